"""A graph that goes wrong in this process is not blamed for it: a patch may be the cause."""

from __future__ import annotations

import json

from onediff_ext.core.errors import BackendError
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.store import BuildRecords
from tests.support.build_checks import draw_all, nothing_is_held_against_a_kind
from tests.support.draw import relative_error
from tests.support.session_fixtures import SmallUNet

TIMEOUT_S = 240


def spoil(session, monkeypatch):
    """Make every graph differ from eager, as if an extension had patched what eager runs."""
    load = session.backend.load

    def load_spoiled(payload, device):
        graph = load(payload, device)
        return lambda arguments: graph(arguments) * 1.05

    monkeypatch.setattr(session.backend, "load", load_spoiled)


def test_a_graph_that_differs_here_is_not_held_against_it(
    open_session, small, instant_workers, monkeypatch
):
    for _ in range(2):  # built here, then loaded
        session = open_session()
        spoil(session, monkeypatch)
        compile_pipe(small.pipe, session=session)
        draw_all(session, small)
        assert {kind.state for kind in session.kinds} == {KindState.FAILED}
        assert nothing_is_held_against_a_kind(session)
        assert session.status().running == "eager"
        session.close()
    assert sum(e.what == "loaded" for e in session.event_log.events) == len(session.kinds)
    assert all("process of its own" in kind.reason for kind in session.kinds)
    sound = open_session()
    other = SmallUNet(seed=5)
    expected = other()
    compile_pipe(other.pipe, session=sound)
    assert relative_error(draw_all(sound, other), expected) < 1e-4
    assert {kind.state for kind in sound.kinds} == {KindState.READY}
    assert sound.count("loaded") == len(sound.kinds)


def test_a_graph_that_cannot_be_loaded_here_is_not_held_against_it(
    open_session, small, instant_workers, monkeypatch
):
    first = open_session()
    compile_pipe(small.pipe, session=first)
    draw_all(first, small)
    session = open_session()

    def no_room(payload, device):
        raise BackendError("CUDA error: out of memory")

    monkeypatch.setattr(session.backend, "load", no_room)
    compile_pipe(small.pipe, session=session)
    draw_all(session, small)
    assert nothing_is_held_against_a_kind(session)
    sound = open_session()
    compile_pipe(small.pipe, session=sound)
    draw_all(sound, small)
    assert sound.count("loaded") == len(sound.kinds)


def test_records_of_the_version_that_blamed_everybody_are_dropped(
    open_session, small, instant_workers
):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    draw_all(session, small)
    build_records, digest = session.build_context.build_records, session.kinds[0].key.digest
    build_records.record_failure(digest, "x", "another's patch", attempts=1, version="9")
    load_checks = {"good": "", "bad": "differs from eager"}
    for machine, problem in load_checks.items():
        build_records.record_load_check(
            digest, "x", machine=machine, payload_sha256="0" * 64, problem=problem
        )
    build_records.record_failure(digest, "x", "another's patch", attempts=1, version="9")
    path = build_records._path(digest)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "schema": 1}))
    found = BuildRecords(session.library.folder).read(digest)
    assert found.failure is None
    assert "good" in found.load_checks
    assert "bad" not in found.load_checks

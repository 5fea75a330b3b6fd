"""Stored graphs that were never loaded on this machine: tried where a crash hurts nobody."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from onediff_ext.core.errors import BackendError, WorkerLostError
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe
from tests.support.draw import relative_error
from tests.support.session_fixtures import InstantWorker, SmallUNet

TIMEOUT_S = 240
CRASH = "#include <stdlib.h>\n__attribute__((constructor)) static void end(void) { abort(); }\n"


@pytest.fixture
def stored(open_session, small, instant):
    """A store with all graphs of the small UNet."""
    session = open_session()
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    session.close()
    return session


def forget_the_proof(session, kind, payload=None):
    """As if another machine had built the graph."""
    stored = session.library.get(kind.key)
    (session.library.folder.build_records / f"{kind.key.digest}.json").unlink()
    session.library.put(
        kind.key,
        payload or stored.payload,
        label=kind.label,
        backend="eager",
        build_seconds=1,
        details={},
    )


def draw_with(session, policy="background"):
    other = SmallUNet(seed=5)
    expected = other()
    compile_pipe(other.pipe, session=session)
    for _ in range(3):
        assert relative_error(other(), expected) < 1e-4
        assert session.wait_for_builds(TIMEOUT_S)
    assert relative_error(other(), expected) < 1e-4


def test_a_sound_graph_is_proved_once(stored, open_session):
    for kind in stored.kinds[:2]:
        forget_the_proof(stored, kind)
    session = open_session(build="never")
    draw_with(session)
    assert session.count("loaded") == len(session.kinds)
    assert sum(e.what == "proved" for e in session.event_log.events) == 2
    again = open_session(build="never")
    draw_with(again)
    assert again.count("loaded") == len(again.kinds)
    assert not [e for e in again.event_log.events if e.what in ("prove", "proved")]


def test_what_an_archive_claims_to_be_proved_is_not_believed(stored, open_session, tmp_path):
    """As graph files of earlier versions said it of themselves."""
    from onediff_ext.engine.machine import machine_digest
    from onediff_ext.store import GraphLibrary

    kind = stored.kinds[0]
    machine = machine_digest(kind.device)
    payload = stored.library.get(kind.key).payload
    claiming = GraphLibrary(tmp_path / "claiming", 1 << 30)
    claiming.put(
        kind.key, payload + b"x", label=kind.label, backend="eager", build_seconds=1,
        details={"proved on": machine},
    )  # fmt: skip
    claiming.export(tmp_path / "claims.zip")
    stored.library.delete(kind.key.digest)
    stored.library.import_archive(tmp_path / "claims.zip", trust=True)
    session = open_session(build="never")
    found = session.library.get(kind.key)
    assert found.header.details == {"proved on": machine}
    assert session.builder.is_load_safe(found, kind) is None
    session.builder.mark_bad(kind, found.header.payload_sha256, "gives other results")
    assert session.builder.is_load_safe(found, kind) is False


class Refuses(InstantWorker):
    """A worker in which every stored graph goes wrong."""

    error: BackendError = BackendError("gives other results")

    def prove(self, payload, program, device, timeout_s):
        raise self.error


class Dies(Refuses):
    """A worker that every stored graph takes with it."""

    error = WorkerLostError("The build worker died: killed by SIGSEGV")


@pytest.mark.parametrize("worker", [Refuses, Dies])
def test_a_bad_graph_is_marked_and_built_anew(stored, open_session, monkeypatch, worker):
    bad = stored.kinds[0]
    forget_the_proof(stored, bad)
    session = open_session()
    monkeypatch.setattr(
        session.builder, "new_worker", lambda cache, in_background: worker("eager", cache)
    )
    draw_with(session)
    assert session.count("built") == 1
    assert session.count("loaded") == len(session.kinds) - 1
    (event,) = [e for e in session.event_log.events if e.what == "bad"]
    assert worker.error.message in event.reason
    again = open_session()
    draw_with(again)
    assert again.count("loaded") == len(again.kinds)


def test_a_graph_that_is_wrong_in_use_is_built_anew_once(stored, open_session, monkeypatch):
    kinds = {kind.label: kind for kind in stored.kinds}
    one, other = kinds["BasicTransformerBlock 32"], kinds["BasicTransformerBlock 64"]
    payload = stored.library.get(other.key).payload
    forget_the_proof(stored, one, payload)
    digest = stored.library.get(one.key).header.payload_sha256
    from onediff_ext.engine.machine import machine_digest

    machine = machine_digest(one.device)
    stored.builder.build_records.record_load_check(
        one.key.digest, one.label, machine=machine, payload_sha256=digest
    )
    session = open_session()

    class Compares(InstantWorker):
        def prove(self, stored, program, device, timeout_s):
            if stored == payload:
                raise BackendError("gives other results")

    monkeypatch.setattr(
        session.builder, "new_worker", lambda cache, in_background: Compares("eager", cache)
    )
    draw_with(session)
    assert session.count("built") == 1
    assert {kind.state for kind in session.kinds} == {KindState.READY}
    assert [e.label for e in session.event_log.events if e.what == "bad"] == [one.label]


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="needs gcc and Linux's libraries"
)
def test_a_library_that_crashes_takes_a_worker_and_nothing_else(open_session, small, tmp_path):
    source, library = tmp_path / "crash.c", tmp_path / "crash.so"
    source.write_text(CRASH)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    first = open_session(backend="inductor", build="never")
    compile_pipe(small.pipe, session=first)
    small()
    kind = max(first.kinds, key=lambda kind: kind.weight)
    first.library.put(
        kind.key, library.read_bytes(), label=kind.label, backend="inductor", build_seconds=1,
        details={},
    )  # fmt: skip
    session = open_session(backend="inductor", build="never")
    compile_pipe(small.pipe, session=session)
    expected = small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert relative_error(small(), expected) == 0
    (failed,) = [kind for kind in session.kinds if kind.state is KindState.FAILED]
    assert "SIGABRT" in failed.reason
    again = open_session(backend="inductor", build="never")
    compile_pipe(small.pipe, session=again)
    small()
    assert not again.background.is_building
    (same,) = [found for found in again.kinds if found.label == kind.label]
    assert "SIGABRT" in same.reason

"""Nothing is held against a kind that a patch, the host or the machine may have caused."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from onediff_ext.building import worker_process
from onediff_ext.core.errors import BackendError
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.store import BuildRecords
from tests.support.draw import relative_error
from tests.support.gates import at_the_gate
from tests.support.ldm_stand_in import written_in
from tests.support.session_fixtures import InstantWorker, SmallUNet

TIMEOUT_S = 240


def nothing_is_held_against_a_kind(session) -> bool:
    """Whether the store remembers no failure and no bad graph."""
    build_records = session.builder.build_records
    digests = [kind.key.digest for kind in session.kinds]
    proofs = [proof for digest in digests for proof in build_records.read(digest).proofs.values()]
    return not list(build_records.failures()) and not any(proof.problem for proof in proofs)


def draw_all(session, small, rounds=3):
    """Draw and build until nothing is left to build; returns the last forward."""
    for _ in range(rounds):
        output = small()
        assert session.wait_for_builds(TIMEOUT_S)
    return output


@pytest.mark.parametrize("children", [0, 2])
def test_a_patch_that_cannot_be_exported_is_not_remembered(
    open_session, small, instant, monkeypatch, children
):
    attend = F.scaled_dot_product_attention

    def foreign(query, *args, **kwargs):
        output = attend(query, *args, **kwargs)
        return output if float(output.abs().sum()) >= 0 else output * 2  # cannot be traced

    session = open_session()
    session.builder.export_children = children
    with monkeypatch.context() as patch:
        # Seen to have changed, and not to be somebody else's.
        hidden = written_in(foreign, "torch.nn.functional")
        patch.setattr(F, "scaled_dot_product_attention", hidden)
        compile_pipe(small.pipe, session=session)
        draw_all(session, small, rounds=8)
        refused = [kind for kind in session.kinds if kind.graph is None]
        assert refused
    assert nothing_is_held_against_a_kind(session)
    again = open_session()
    other = SmallUNet(seed=5)
    expected = other()
    compile_pipe(other.pipe, session=again)
    assert relative_error(draw_all(again, other), expected) < 1e-4
    assert {kind.state for kind in again.kinds} == {KindState.READY}


def test_a_block_that_cannot_be_exported_is_given_up_for_this_process(
    open_session, small, instant, monkeypatch
):
    session = open_session(build_attempts=2)
    session.builder.export_children = 0
    compile_pipe(small.pipe, session=session)
    monkeypatch.setattr(
        "onediff_ext.engine.running.block_identity.export_block",
        lambda *args: (_ for _ in ()).throw(KeyError("x")),
    )
    draw_all(session, small, rounds=6)
    assert {kind.state for kind in session.kinds} == {KindState.FAILED}
    tries = [e for e in session.event_log.events if e.what == "put off"]
    assert len(tries) == len(session.kinds)  # one of two
    assert nothing_is_held_against_a_kind(session)


@pytest.mark.parametrize("children", [0, 2])
def test_a_setting_that_changes_between_pictures(open_session, small, instant, children):
    """A1111's "Tiling": kinds met with it are built once it is on again, and plain ones at once."""
    plain = small()
    convolutions = [m for m in small.unet.modules() if isinstance(m, torch.nn.Conv2d)]

    def tile(on: bool) -> None:
        for convolution in convolutions:
            convolution.padding_mode = "circular" if on else "zeros"
        for runner in runners:
            runner.tree = None  # as `Component` does for a model whose attributes have changed

    session = open_session()
    session.builder.export_children = children
    compile_pipe(small.pipe, session=session)
    runners = compiled_state(small.pipe).components[0].runners
    tile(True)
    with at_the_gate(session):
        with session.picture():
            tiled = small()
        tile(False)
    assert session.wait_for_builds(TIMEOUT_S)
    met = {kind for kind in session.kinds if kind.state is not KindState.READY}
    assert met
    assert {kind.state for kind in met} <= {KindState.MISSING, KindState.UNCHECKED}
    for _ in range(3):
        with session.picture():
            assert relative_error(small(), plain) < 1e-4
        assert session.wait_for_builds(TIMEOUT_S)
    status = session.status()
    assert (status.running, status.reasons) == ("compiled", ()), status
    tile(True)
    for _ in range(6):
        with session.picture():
            assert relative_error(small(), tiled) < 1e-4
        assert session.wait_for_builds(TIMEOUT_S)
    assert session.status().running == "compiled", session.status()
    assert {kind.state for kind in session.kinds} == {KindState.READY}


def test_a_kind_outlives_the_block_that_it_was_named_after(open_session, small, instant):
    """Another checkpoint was loaded before the graphs of the first one were built."""
    session = open_session()
    compile_pipe(small.pipe, session=session)
    other = SmallUNet(seed=5)
    expected = other()
    with at_the_gate(session):
        small()
        compile_pipe(other.pipe, session=session)
        other()
        undo_compile(small.pipe)
        small.unet = small._pipe = None
        gc.collect()
    assert session.wait_for_builds(TIMEOUT_S)
    assert relative_error(draw_all(session, other), expected) < 1e-4
    assert {kind.state for kind in session.kinds} == {KindState.READY}
    assert not [e for e in session.event_log.events if e.what == "put off"]


class Failing(InstantWorker):
    """A worker process in which the first builds of each program fail."""

    failures = 1
    error: Exception = BackendError("C++ compile error")
    seen: dict[bytes, int]

    def build(self, program, device, timeout_s):
        count = self.seen[program] = self.seen.get(program, 0) + 1
        if count <= self.failures:
            raise self.error
        return super().build(program, device, timeout_s)


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize(
    "error", [BackendError("C++ compile error"), worker_process.lost("killed by SIGSEGV")]
)
def test_what_fails_in_a_worker_counts_when_another_one_repeats_it(
    open_session, small, monkeypatch, failures, error
):
    session, renewed = open_session(), []

    class Worker(Failing):
        seen: ClassVar[dict[bytes, int]] = {}

        def renew(self):
            renewed.append(1)

    Worker.failures, Worker.error = (failures if failures == 1 else 99), error
    monkeypatch.setattr(
        session.builder, "new_worker", lambda cache, in_background: Worker("eager", cache)
    )
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert len(renewed) >= len(session.kinds)  # each second try in a process of its own
    if failures == 1:
        assert session.count("built") == len(session.kinds)
        assert nothing_is_held_against_a_kind(session)
    else:
        assert {kind.state for kind in session.kinds} == {KindState.FAILED}
        failed = {verdict.digest for verdict in session.builder.build_records.failures()}
        assert failed == {kind.key.digest for kind in session.kinds}


def test_a_build_that_takes_too_long_is_not_remembered(open_session, small, monkeypatch):
    """The machine may be busy, or asleep."""
    from onediff_ext.building.worker_process import WorkerProcess

    worker = WorkerProcess("eager", Path(os.devnull))
    with pytest.raises(worker_process.WorkerKilledError, match="longer"):
        worker._read_answer(0.01)


def spoil(session, monkeypatch):
    """Have every graph differ from eager, as if somebody had patched what eager runs."""
    load = session.backend.load

    def load_spoiled(payload, device):
        graph = load(payload, device)
        return lambda arguments: graph(arguments) * 1.05

    monkeypatch.setattr(session.backend, "load", load_spoiled)


def test_a_graph_that_differs_here_is_not_held_against_it(
    open_session, small, instant, monkeypatch
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
    open_session, small, instant, monkeypatch
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


def test_a_proof_whose_worker_was_killed_is_not_held_against_the_graph(
    open_session, small, instant, monkeypatch
):
    from tests.building.test_load_checks import forget_the_proof

    first = open_session()
    compile_pipe(small.pipe, session=first)
    draw_all(first, small)
    for kind in first.kinds:
        forget_the_proof(first, kind)
    session = open_session(build_attempts=2)

    class Killed(InstantWorker):
        def prove(self, payload, program, device, timeout_s):
            raise worker_process.lost("killed by SIGKILL")

    monkeypatch.setattr(
        session.builder, "new_worker", lambda cache, in_background: Killed("eager", cache)
    )
    compile_pipe(small.pipe, session=session)
    draw_all(session, small)
    assert nothing_is_held_against_a_kind(session)


def test_records_of_the_version_that_blamed_everybody_are_dropped(open_session, small, instant):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    draw_all(session, small)
    build_records, digest = session.builder.build_records, session.kinds[0].key.digest
    build_records.record_failure(digest, "x", "another's patch", attempts=1, version="9")
    proofs = {"good": "", "bad": "differs from eager"}
    for machine, problem in proofs.items():
        build_records.record_load_check(
            digest, "x", machine=machine, payload_sha256="0" * 64, problem=problem
        )
    build_records.record_failure(digest, "x", "another's patch", attempts=1, version="9")
    path = build_records._path(digest)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "schema": 1}))
    found = BuildRecords(session.library.folder).read(digest)
    assert found.failure is None
    assert "good" in found.proofs
    assert "bad" not in found.proofs


def no_room(*args, **kwargs):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_a_fork_without_memory_exports_in_this_process(open_session, small, instant, monkeypatch):
    monkeypatch.setattr("onediff_ext.building.exporting.os.fork", no_room)
    session = open_session()
    session.builder.export_children = 2
    compile_pipe(small.pipe, session=session)
    descriptors = len(os.listdir("/proc/self/fd"))
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_second_fork_without_memory_waits_for_the_first(
    open_session, small, instant, monkeypatch
):
    fork, forked, ended = os.fork, [], os.WEXITED | os.WNOWAIT | os.WNOHANG

    def one_at_a_time():
        with contextlib.suppress(ChildProcessError):  # it has ended
            if forked and not os.waitid(os.P_PID, forked[-1], ended):
                no_room()
        pid = fork()
        if pid:
            forked.append(pid)
        return pid

    monkeypatch.setattr("onediff_ext.building.exporting.os.fork", one_at_a_time)
    here = []
    monkeypatch.setattr(
        "onediff_ext.building.exporting._export_here", lambda kind: here.append(kind) or no_room()
    )
    session = open_session()
    session.builder.export_children = 3
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert not here
    assert session.count("built") == len(session.kinds)


def test_workers_that_cannot_be_started_fail_no_kind(open_session, small, monkeypatch):
    session = open_session()
    session.builder.export_children = 0
    with monkeypatch.context() as patch:
        patch.setattr("onediff_ext.building.worker_process.subprocess.Popen", no_room)
        compile_pipe(small.pipe, session=session)
        small()
        assert session.wait_for_builds(TIMEOUT_S)
    assert {kind.state for kind in session.kinds} == {KindState.MISSING}
    assert "Cannot allocate memory" in session.status().line()
    assert "Free some space" not in session.status().line()
    assert session.builder.retry_at > 0
    session.build_in_background()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)


@pytest.mark.parametrize("policy", ["background", "wait"])
def test_fewer_workers_where_there_is_room_for_fewer(open_session, small, monkeypatch, policy):
    """The third process has no room: the two that have it build everything."""
    session, alive = open_session(worker_process=4, build=policy), []

    class Worker(InstantWorker):
        def build(self, program, device, timeout_s):
            if self not in alive:
                if len(alive) == 2:
                    raise worker_process.NoMemoryError("No build process can be started.")
                alive.append(self)
            return super().build(program, device, timeout_s)

    monkeypatch.setattr(
        session.builder, "new_worker", lambda cache, in_background: Worker("eager", cache)
    )
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)
    assert session.builder.problem == ""


def test_in_wait_mode_a_full_machine_fails_no_kind(open_session, small, instant, monkeypatch):
    from onediff_ext.core.errors import MachineError

    session = open_session(build="wait")
    asked = []

    def full(worker, program, device):
        asked.append(1)
        raise MachineError("No space left on device.", "Free some.")

    with monkeypatch.context() as patch:
        patch.setattr(session.builder, "build_in", full)
        compile_pipe(small.pipe, session=session)
        small()
        before = len(asked)
        small()
        assert len(asked) == before > 0  # not at each forward
    assert {kind.state for kind in session.kinds} == {KindState.MISSING}
    assert "No space left" in session.status().line()
    session.build_missing()
    assert session.count("built") == len(session.kinds)


def test_no_room_for_a_thread_does_not_cost_the_picture(open_session, small, instant, monkeypatch):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    start = threading.Thread.start

    def full(thread):
        if thread.name.startswith("onediff-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        small()
        assert not session.status().building
        assert "can't start new thread" in session.status().line()
    session.build_in_background()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)


def test_workers_taken_by_several_threads_at_once(open_session, small, monkeypatch):
    """The list of idle workers is looked at and taken from in one go."""
    session, started = open_session(worker_process=8), []
    barrier = threading.Barrier(4, timeout=5)

    class Worker(InstantWorker):
        def build(self, program, device, timeout_s):
            assert self not in started
            started.append(self)
            try:
                if len(session.kinds) >= 4:
                    with contextlib.suppress(threading.BrokenBarrierError):
                        barrier.wait(0.2)
                return super().build(program, device, timeout_s)
            finally:
                started.remove(self)

    monkeypatch.setattr(
        session.builder, "new_worker", lambda cache, in_background: Worker("eager", cache)
    )
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(60)
    assert session.count("built") == len(session.kinds)

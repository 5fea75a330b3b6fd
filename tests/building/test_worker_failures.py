"""Workers that fail, die, hang or have no room: only a failure of two workers is recorded."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from onediff_ext.building.build_jobs import Job
from onediff_ext.building.event_log import EventLog
from onediff_ext.building.worker_failures import WorkerFailures, last_words, worker_lost_error
from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.core.errors import BackendError, MachineError, NoMemoryError, WorkerKilledError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe
from tests.support.build_checks import draw_all, forget_load_check, nothing_is_held_against_a_kind
from tests.support.session_fixtures import InstantWorker

pytestmark = pytest.mark.starts_workers

TIMEOUT_S = 240
# Of a worker that imports torch on Windows.
TORCH_LACKS_MEMORY = (
    "Traceback (most recent call last):",
    "OSError: [WinError 1455] Die Auslagerungsdatei ist zu klein. Error loading cufft64_11.dll",
)


def no_room(*args, **kwargs):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.fixture
def job():
    kind = BlockKind(KindKey({}), "Block 64", torch.device("cpu"), lambda device: bytes)
    return Job(kind, contextlib.ExitStack())


def failures_of_a_run(most_attempts=4):
    log = EventLog()
    return WorkerFailures(most_attempts, most_workers=3, event_log=log), log


def test_a_signal_from_outside_is_no_fault(job):
    failures, log = failures_of_a_run()
    killed = worker_lost_error("killed by SIGKILL")
    assert isinstance(killed, WorkerKilledError)
    assert not isinstance(worker_lost_error("killed by SIGSEGV"), WorkerKilledError)
    assert [failures.may_retry(job, killed) for _ in range(4)] == [True, True, True, False]
    assert not failures.is_to_blame(job)
    assert [event.what for event in log.events] == ["retried"] * 3


@pytest.mark.parametrize(
    ("code", "log", "windows", "words", "is_outside"),
    [
        (-9, ["x"], False, "killed by SIGKILL", True),
        (-11, [], False, "killed by SIGSEGV", False),
        (1, ["Traceback (most recent call last):", "KeyError: 1"], False, "KeyError: 1", False),
        (1, [], False, "exit code 1", False),
        (1, ["Traceback (most recent call last):", "KeyError: 1"], True, "KeyError: 1", False),
        (1, ["a warning"], True, "killed by another program", True),
        (1, [*TORCH_LACKS_MEMORY], True, TORCH_LACKS_MEMORY[-1], True),
        (3, ["assertion failed"], True, "assertion failed", False),
        (0xC000013A, ["a warning"], True, "killed by Ctrl-C", True),
        (0xC0000017, [], True, "killed by the system, which has no memory", True),
        (0xC0000005, ["a warning"], True, "crashed with 0xc0000005", False),
    ],
)
def test_how_a_worker_died(code, log, windows, words, is_outside):
    """Windows has exit codes in place of signals."""
    assert last_words(code, log, windows) == words
    assert isinstance(worker_lost_error(words), WorkerKilledError) is is_outside


def test_two_faults_blame_the_program(job):
    failures, _ = failures_of_a_run()
    error = BackendError("C++ compile error")
    assert failures.may_retry(job, error)
    assert not failures.is_to_blame(job)
    assert not failures.may_retry(job, error)
    assert failures.is_to_blame(job)


def test_after_a_lost_worker_jobs_run_one_at_a_time(job):
    failures, _ = failures_of_a_run()
    assert failures.worker_limit(8) == 3
    assert failures.may_retry(job, worker_lost_error("killed by SIGSEGV"))
    assert failures.worker_limit(8) == 1


def test_no_room_for_another_worker_keeps_the_present_ones(job):
    failures, _ = failures_of_a_run()
    assert not failures.may_go_on(job, NoMemoryError("No build process can be started."), 0)
    assert failures.may_go_on(job, NoMemoryError("No build process can be started."), 2)
    assert failures.worker_limit(8) == 2
    assert not failures.may_go_on(job, MachineError("No space left on device."), 2)
    assert job.failed_attempts == job.faults == 0


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
    "error", [BackendError("C++ compile error"), worker_lost_error("killed by SIGSEGV")]
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
        session.build_context, "new_worker", lambda cache, in_background: Worker("eager", cache)
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
        failed = {
            build_record.digest for build_record in session.build_context.build_records.failures()
        }
        assert failed == {kind.key.digest for kind in session.kinds}


def test_a_build_that_takes_too_long_is_not_remembered(open_session, small, monkeypatch):
    """The machine may be busy, or asleep."""
    worker = WorkerProcess("eager", Path(os.devnull))
    with pytest.raises(WorkerKilledError, match="longer"):
        worker._read_answer(0.01)


def test_a_load_check_whose_worker_was_killed_is_not_held_against_the_graph(
    open_session, small, instant_workers, monkeypatch
):
    first = open_session()
    compile_pipe(small.pipe, session=first)
    draw_all(first, small)
    for kind in first.kinds:
        forget_load_check(first, kind)
    session = open_session(build_attempts=2)

    class Killed(InstantWorker):
        def check_load(self, payload, program, device, timeout_s):
            raise worker_lost_error("killed by SIGKILL")

    monkeypatch.setattr(
        session.build_context, "new_worker", lambda cache, in_background: Killed("eager", cache)
    )
    compile_pipe(small.pipe, session=session)
    draw_all(session, small)
    assert nothing_is_held_against_a_kind(session)


def test_windows_without_memory_for_a_worker(tmp_path, monkeypatch):
    def too_small(*args, **kwargs):
        raise OSError(errno.EINVAL, "[WinError 1455] Die Auslagerungsdatei ist zu klein")

    monkeypatch.setattr("onediff_ext.building.worker_process.subprocess.Popen", too_small)
    with pytest.raises(NoMemoryError, match="No build process can be started"):
        WorkerProcess("eager", tmp_path).build(b"", "cpu", TIMEOUT_S)


def test_workers_that_cannot_be_started_fail_no_kind(open_session, small, monkeypatch):
    session = open_session()
    session.build_context.export_children = 0
    with monkeypatch.context() as patch:
        patch.setattr("onediff_ext.building.worker_process.subprocess.Popen", no_room)
        compile_pipe(small.pipe, session=session)
        small()
        assert session.wait_for_builds(TIMEOUT_S)
    assert {kind.state for kind in session.kinds} == {KindState.MISSING}
    assert "Cannot allocate memory" in session.status().line()
    assert "Free some space" not in session.status().line()
    assert session.build_context.outcomes.retry_at > 0
    session.build_in_background()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)


@pytest.mark.parametrize("policy", ["background", "wait"])
def test_fewer_workers_where_there_is_room_for_fewer(open_session, small, monkeypatch, policy):
    """The third process has no room: the two that have it build everything."""
    session, alive = open_session(workers=4, build=policy), []

    class Worker(InstantWorker):
        def build(self, program, device, timeout_s):
            if self not in alive:
                if len(alive) == 2:
                    raise NoMemoryError("No build process can be started.")
                alive.append(self)
            return super().build(program, device, timeout_s)

    monkeypatch.setattr(
        session.build_context, "new_worker", lambda cache, in_background: Worker("eager", cache)
    )
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)
    assert session.build_context.outcomes.blocked_reason == ""


def test_in_wait_mode_a_full_machine_fails_no_kind(
    open_session, small, instant_workers, monkeypatch
):
    session = open_session(build="wait")
    asked = []

    def full(worker, program, device):
        asked.append(1)
        raise MachineError("No space left on device.", "Free some.")

    with monkeypatch.context() as patch:
        patch.setattr(session.build_context, "build_in", full)
        compile_pipe(small.pipe, session=session)
        small()
        before = len(asked)
        small()
        assert len(asked) == before > 0  # not at each forward
    assert {kind.state for kind in session.kinds} == {KindState.MISSING}
    assert "No space left" in session.status().line()
    session.build_missing()
    assert session.count("built") == len(session.kinds)


def test_workers_taken_by_several_threads_at_once(open_session, small, monkeypatch):
    """Two threads never take the same idle worker."""
    session, started = open_session(workers=8), []
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
        session.build_context, "new_worker", lambda cache, in_background: Worker("eager", cache)
    )
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(60)
    assert session.count("built") == len(session.kinds)

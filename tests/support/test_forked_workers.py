"""A forked worker is one for all that starts, asks and ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.core.errors import WorkerLostError
from tests.support import forked_workers

pytestmark = pytest.mark.skipif(not forked_workers.is_possible(), reason="needs Linux")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess("eager", tmp_path)
    yield worker
    worker.close()


def is_forked(worker: WorkerProcess) -> bool:
    return "fork_server" in Path(f"/proc/{worker.pid}/cmdline").read_text()


def test_it_has_the_things_of_a_worker(worker: WorkerProcess, tmp_path: Path) -> None:
    assert forked_workers.read_early(os.environ) == forked_workers.AT_FIRST  # no test leaves others
    scratch = worker._start()
    assert is_forked(worker)
    assert worker.pid is not None
    assert os.getpgid(worker.pid) == worker.pid
    assert Path(f"/proc/{worker.pid}/cwd").resolve() == scratch.resolve()
    assert scratch.parent == tmp_path
    worker._ask({"task": "build", "program": str(scratch / "none"), "graph": str(scratch / "graph"),
                 "backend": "eager", "device": "cpu"})  # fmt: skip
    assert "cannot be read" in str(worker._read_answer(60)["error"])


def test_one_that_is_killed_is_lost(worker: WorkerProcess) -> None:
    worker._start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        worker._read_answer(60)
    assert worker.pid is None


def test_an_end_ends_its_process(worker: WorkerProcess) -> None:
    worker._start()
    process = worker._process
    assert process is not None
    assert process.poll() is None
    worker.close()
    assert process.poll() == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()


def test_it_ends_when_its_input_closes(worker: WorkerProcess) -> None:
    worker._start()
    process = worker._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == -signal.SIGKILL  # of its whole group, with its compilers


def test_another_environment_has_a_worker_of_its_own(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    worker._start()
    assert not is_forked(worker)


@pytest.mark.starts_workers
def test_tests_of_the_start_have_one_that_is_started(worker: WorkerProcess) -> None:
    worker._start()
    assert not is_forked(worker)


def test_the_server_ends_with_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    server = forked_workers.ForkServer()
    connection = server._connection()
    process = server.process
    assert process is not None
    assert process.poll() is None
    connection.shutdown(2)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() == 0

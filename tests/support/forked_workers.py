"""Worker processes of builds, forked from a server instead of started, since imports take seconds.

Tests marked `starts_workers` are about the start of a worker, so theirs are started.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.building.worker_surroundings import worker_command, worker_environment
from onediff_ext.engine.backend_port import COMPILER_FILES_VARIABLE

_SERVER = Path(__file__).with_name("fork_server.py")
# Variables that are read while modules are imported, by their beginnings; these are read later.
_READ_EARLY = (
    *("TORCH", "PYTORCH", "AOT_INDUCTOR", "TRITON", "CUDA", "OMP_", "MKL_", "LD_", "PYTHON"),
    *("CC", "CXX", "PATH", "ONEDIFF_"),
)
_READ_LATE = {
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"),
    *("OMP_NUM_THREADS", "PYTHONPATH", "PYTHONBREAKPOINT", "ONEDIFF_STORE"),  # Ray sets the third
    COMPILER_FILES_VARIABLE,
}
# What `WorkerProcess` sets for all of its workers.
_SET = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


class ForkedWorker:
    """Stands for a `subprocess.Popen`.

    Args:
        pid: Its process id, and that of its group.
        ended: Set at its end.
        stdin, stdout: As the process that started it sees them; None where it has no pipe.
    """

    def __init__(
        self, pid: int, ended: _Ended, stdin: IO[str] | None, stdout: IO[str] | None
    ) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self.returncode is None and self._ended.is_set():
            self.returncode = self._ended.code
        return self.returncode

    def kill(self) -> None:
        """End it at once, without its compilers."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended.

        Raises:
            subprocess.TimeoutExpired: It runs still.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        self.returncode = self._ended.code
        return self.returncode


class _Ended(threading.Event):
    """Set with an exit status."""

    code = 0

    def end(self, code: int) -> None:
        """Set it.

        Args:
            code: As `subprocess.Popen.returncode` has it.
        """
        self.code = code
        self.set()


# Of each process that the server has forked: its id, and the event of its end.
_Started = queue.SimpleQueue[tuple[int, _Ended]]


class ForkServer:
    """Starts with its first worker, and ends with this process.

    Attributes:
        process: The server; None before its start.
    """

    process: subprocess.Popen[bytes] | None = None

    def __init__(self) -> None:
        self._lock, self._started = threading.Lock(), _Started()
        self._socket: socket.socket | None = None

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a worker with this environment would import what the server has imported.

        Args:
            environment: Of the worker.
        """
        return read_early(environment) == AT_FIRST

    def start(
        self,
        worker: WorkerProcess,
        environment: Mapping[str, str],
        scratch: Path,
        stdin: int | IO[bytes],
        stdout: int,
    ) -> ForkedWorker:
        """Fork a worker process.

        Args:
            environment: Of the worker.
            worker, scratch, stdin, stdout: As `WorkerProcess._popen` has them.
        """
        request = {
            "environment": dict(environment),
            "folder": str(scratch),
            "arguments": ["background"] if worker._in_background else [],
        }
        with (scratch / "log").open("wb") as log:
            theirs, ours = _ends_of(stdin, stdout)
            try:
                with self._lock:
                    pid, ended = self._fork(request, [*theirs, log.fileno()])
            finally:
                for descriptor, given in zip(theirs, (stdin, stdout), strict=True):
                    if isinstance(given, int):
                        os.close(descriptor)
        return ForkedWorker(pid, ended, *ours)

    def _fork(self, request: Mapping[str, object], descriptors: list[int]) -> tuple[int, _Ended]:
        try:
            connection = self._connection()
            line = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(connection, [line], descriptors)
            connection.sendall(line[sent:])
            while True:
                with contextlib.suppress(queue.Empty):
                    return self._started.get(timeout=0.5)
                if self._socket is None:
                    raise RuntimeError("the server of worker processes has ended: see above")
        except BaseException:  # an interrupt: the next worker must not get this one's answer
            self._forget()
            raise

    def _forget(self) -> None:
        """Let the next worker have another server."""
        connection, self._socket = self._socket, None
        self._started = _Started()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _connection(self) -> socket.socket:
        """The socket to the server, which is started for it."""
        if self._socket is None:
            ours, theirs = socket.socketpair()
            command = worker_command(_SERVER)
            number = command.index(str(_SERVER)) + 1
            self.process = subprocess.Popen(
                [*command[:number], str(theirs.fileno()), *command[number:]],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_SET},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
            self._socket = ours
            told = ours, self._started
            threading.Thread(target=self._listen, args=told, daemon=True).start()
        return self._socket

    def _listen(self, connection: socket.socket, started: _Started) -> None:
        ends: dict[int, _Ended] = {}
        with contextlib.suppress(ConnectionError), connection.makefile("r") as lines:
            for line in lines:
                answer = json.loads(line)
                if "started" in answer:
                    pid = answer["started"]
                    ends[pid] = _Ended()
                    started.put((pid, ends[pid]))
                else:
                    ends.pop(answer["ended"]).end(answer["code"])
        for pid, ended in ends.items():  # no server tells the end of these
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            ended.end(-signal.SIGKILL)
        if self._socket is connection:
            self._socket = None


def read_early(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read while a worker's modules are imported.

    Args:
        environment: A worker's, or this process's.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_EARLY) and name not in _READ_LATE
    }


AT_FIRST = read_early(os.environ)  # before any test changes it


def _ends_of(
    stdin: int | IO[bytes], stdout: int
) -> tuple[list[int], tuple[IO[str] | None, IO[str] | None]]:
    """The worker's descriptors for its standard input and output, and our ends of these."""
    written: IO[str] | None = None
    read: IO[str] | None = None
    if stdin == subprocess.PIPE:
        given, end = os.pipe()
        written = io.TextIOWrapper(io.FileIO(end, "wb"), encoding="utf-8", write_through=True)
    else:
        assert not isinstance(stdin, int)
        given = stdin.fileno()
    if stdout == subprocess.PIPE:
        end, taken = os.pipe()
        read = open(end, encoding="utf-8", errors="replace")  # noqa: SIM115
    else:
        assert stdout == subprocess.DEVNULL
        taken = os.open(os.devnull, os.O_WRONLY)
    return [given, taken], (written, read)


@functools.cache
def _server() -> ForkServer:
    return ForkServer()


if hasattr(os, "register_at_fork"):
    # A forked process has neither the thread that listens nor, perhaps, a lock that is open.
    os.register_at_fork(after_in_child=_server.cache_clear)


def is_possible() -> bool:
    """Whether this system can fork a worker from a server."""
    return sys.platform == "linux" and hasattr(socket, "send_fds")


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Fork the workers of this test.

    Args:
        patch: Undone after the test.
    """
    if not is_possible():
        return
    own = WorkerProcess.__dict__["_popen"]
    script = WorkerProcess.script

    def popen(worker: WorkerProcess, scratch: Path, stdin: int | IO[bytes], stdout: int) -> Any:
        environment = worker_environment(worker._cache, scratch, worker._compiler_files)
        if worker.script != script or not _server().serves(environment):
            return own(worker, scratch, stdin, stdout)  # a test is about these
        return _server().start(worker, environment, scratch, stdin, stdout)

    patch.setattr(WorkerProcess, "_popen", popen)

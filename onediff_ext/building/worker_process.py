"""A worker process that builds and checks graphs, as the drawing process sees it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

import onediff_ext
from onediff_ext.building.build_folder import ALONE_LOCK
from onediff_ext.building.worker.blame import MACHINE, MEMORY, blame_of
from onediff_ext.building.worker.store_alone import BUILD_ALONE
from onediff_ext.building.worker_failures import last_words, worker_lost_error
from onediff_ext.building.worker_surroundings import worker_command, worker_environment
from onediff_ext.core.errors import (
    BackendError,
    MachineError,
    NoMemoryError,
    WorkerKilledError,
    WorkerLostError,
)

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_LOOK_AT_PACE_S = 1.0
_BLAMED: dict[str, type[BackendError]] = {MACHINE: MachineError, MEMORY: WorkerKilledError}
_PROGRAM, _GRAPH = "program.pt2", "graph.bin"  # in a worker's own folder
_NO_ROOM_FOR_A_PROCESS = (errno.ENOMEM, errno.EAGAIN)


@dataclass(frozen=True)
class Built:
    """A new graph.

    Args:
        payload: The graph's bytes.
        seconds: Time in the worker, including the trial run; processor time where the worker had
            to wait for the processors.
    """

    payload: bytes
    seconds: float


@dataclass(frozen=True)
class Tuned:
    """A graph that took more effort than the stored one.

    Args:
        payload: Its bytes.
        seconds: As in `Built`.
        before_ms, after_ms: A call of the stored graph, and of this one, for large pictures and
            for small ones.
    """

    payload: bytes
    seconds: float
    before_ms: Sequence[float]
    after_ms: Sequence[float]


class WorkerProcess:
    """One worker process. It starts with its first task and stays for the next ones.

    Args:
        backend: Name of the backend that it builds for.
        cache: Folder for the compilers' own caches; workers may share one.
        compiler_files: Folder in which workers keep the compilers' files that all graphs share;
            None is one in `cache`.
        in_background: At a low priority, since pictures are drawn beside it.
        pace: Returns the speed that the pictures on a device leave to it now, 1 for full speed. A
            time limit takes it into account: a worker that waits for the processors is not lost.
    """

    script = Path(onediff_ext.__file__).parent / "building" / "worker" / "start_worker.py"

    def __init__(
        self,
        backend: str,
        cache: Path,
        in_background: bool = False,
        pace: Callable[[torch.device], float] | None = None,
        compiler_files: Path | None = None,
    ) -> None:
        self._backend, self._in_background = backend, in_background
        self._pace, self._device = pace, torch.device("cpu")
        self._cache = cache.absolute()  # workers have a current folder of their own
        self._compiler_files = (compiler_files or cache / "compiler-files").absolute()
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._scratch: Path | None = None
        self._lock = threading.Lock()
        self._closed = self._was_asked = False

    @property
    def pid(self) -> int | None:
        """The process id, or None when no process lives."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def build(self, program: bytes, device: str, timeout_s: float) -> Built:
        """Build the graph of an exported program, and try it out.

        Args:
            program: From `BlockKind.export`.
            device: The device that the graph is for, such as ``"cuda:0"``.
            timeout_s: A build that takes longer counts as lost.

        Raises:
            WorkerLostError: The worker died, hung, or had too little memory.
            MachineError: There is no disk space, or no compiler.
            BackendError: It cannot be built, or its results differ from eager.
        """
        answer, payload = self._work("build", program, b"", device, timeout_s)
        return Built(payload, float(str(answer["seconds"])))

    def check_load(self, payload: bytes, program: bytes, device: str, timeout_s: float) -> None:
        """Load a stored graph where a crash is harmless, and compare it with its program.

        Args:
            payload: The stored graph's bytes.
            program: From `BlockKind.export`; computes the expected results.
            device: The device that the graph is for, such as ``"cuda:0"``.
            timeout_s: A check that takes longer counts as lost.

        Raises:
            WorkerLostError: The worker crashed.
            MachineError: There is no disk space.
            BackendError: It cannot be loaded, or its results differ from eager.
        """
        self._work("check load", program, payload, device, timeout_s)

    def tune(self, payload: bytes, program: bytes, device: str, timeout_s: float) -> Tuned:
        """Build a graph again with more effort, try it out, and measure it beside the stored one.

        Args:
            payload: The stored graph's bytes.
            program: From `BlockKind.export`.
            device: The device that the graph is for, such as ``"cuda:0"``.
            timeout_s: What takes longer counts as lost.

        Raises:
            WorkerLostError, MachineError, BackendError: As for `build`.
        """
        answer, tuned = self._work("tune", program, payload, device, timeout_s)
        before_ms, after_ms = (tuple(map(float, answer[k])) for k in ("before_ms", "after_ms"))
        return Tuned(tuned, float(str(answer["seconds"])), before_ms, after_ms)

    def hand_over(self, program: bytes, store_request: Mapping[str, object]) -> bool:
        """Let a worker that builds, or is being started for a build, finish without this process.

        The worker's process does not belong to this object any more. `build` raises
        `WorkerLostError`.

        Args:
            program: The one that `build` was called with.
            store_request: From `BuildContext.store_request`; where the graph is stored.

        Returns:
            Whether the worker was told.
        """
        with self._lock:
            scratch = self._scratch
            if self._closed or self._process is None or scratch is None:
                return False
            try:
                (scratch / ALONE_LOCK).touch()
                if not self._was_asked:
                    self._was_asked = True
                    (scratch / _PROGRAM).write_bytes(program)
                    self._ask(self._request("build", scratch, str(self._device)))
                # What is in the pipe reaches the worker even after the end of this process.
                self._ask({**store_request, "graph": str(scratch / _GRAPH)})
            except (OSError, WorkerLostError):
                return False
            self._closed = True
            self._process = self._scratch = None
        self._answers.put(None)
        return True

    def build_alone(self, tasks: Sequence[tuple[bytes, Mapping[str, object]]], device: str) -> None:
        """Start a worker that builds and stores graphs one after the other, and ends.

        The worker's process does not belong to this object.

        Args:
            tasks: Programs from `BlockKind.export`, each with `BuildContext.store_request`.
            device: The device that the graphs are for, such as ``"cuda:0"``.

        Raises:
            OSError: There is no room for its files, or for a process.
        """
        scratch = Path(tempfile.mkdtemp(prefix="worker-", dir=self._cache))
        (scratch / ALONE_LOCK).touch()
        lines = []
        for number, (program, store_request) in enumerate(tasks):
            path = scratch / f"{number}.pt2"
            path.write_bytes(program)
            request = self._request(BUILD_ALONE, scratch, device)
            lines.append(json.dumps({**store_request, **request, "program": str(path)}) + "\n")
        requests = scratch / "requests"
        requests.write_text("".join(lines), encoding="ascii")
        with requests.open("rb") as stdin:
            self._popen(scratch, stdin, subprocess.DEVNULL)

    def renew(self) -> None:
        """Start a new process for the next task: this one may have caused a failure."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End the worker and its compilers at once, for good, and remove their files."""
        with self._lock:
            self._closed = True
            self._end()

    def _work(
        self, task: str, program: bytes, payload: bytes, device: str, timeout_s: float
    ) -> tuple[dict[str, Any], bytes]:
        self._device, self._was_asked = torch.device(device), False
        try:
            scratch = self._start()
            target = scratch / _GRAPH
            with self._lock:
                is_asked, self._was_asked = self._was_asked, True
                if not is_asked:
                    (scratch / _PROGRAM).write_bytes(program)
                    if payload:
                        target.write_bytes(payload)
                    self._ask(self._request(task, scratch, device))
            answer = self._read_answer(timeout_s)
            if "error" in answer:
                error = _BLAMED.get(str(answer.get("blame")), BackendError)(str(answer["error"]))
                if answer.get("needs_restart") or isinstance(error, WorkerLostError):
                    self._end()  # the next build starts another process
                raise error
            made = b"" if task == "check load" else target.read_bytes()
            target.unlink()
        except OSError as exc:
            self._end()
            if exc.errno in _NO_ROOM_FOR_A_PROCESS or blame_of(str(exc)) == MEMORY:
                raise NoMemoryError(f"No build process can be started ({exc.strerror}).") from exc
            raise MachineError(
                f"A build cannot work in {self._cache} ({exc.strerror or exc}).",
                "Free some space there, or set TMPDIR to another folder.",
            ) from exc
        return answer, made

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process)
            process.wait()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    def _start(self) -> Path:
        with self._lock:
            if self._closed:
                raise WorkerLostError("The worker was ended.")
            if self._process is not None and self._process.poll() is None and self._scratch:
                return self._scratch
            self._end()
            self._scratch = Path(tempfile.mkdtemp(prefix="worker-", dir=self._cache))
            self._answers = queue.SimpleQueue()
            self._process = self._popen(self._scratch, subprocess.PIPE, subprocess.PIPE)
            scratch = self._scratch
        threading.Thread(
            target=_pump, args=(self._process, self._answers), name="onediff-worker", daemon=True
        ).start()
        self._read_answer(_START_TIMEOUT_S)
        return scratch

    def _popen(self, scratch: Path, stdin: int | IO[bytes], stdout: int) -> subprocess.Popen[str]:
        command = worker_command(self.script)
        with (scratch / "log").open("wb") as log:
            return subprocess.Popen(
                [*command, "background"] if self._in_background else command,
                stdin=stdin,
                stdout=stdout,
                stderr=log,
                encoding="utf-8",  # of JSON, all of it ASCII
                errors="replace",
                # Not the user's current folder: it may hold modules and programs of any kind.
                cwd=scratch,
                env=worker_environment(self._cache, scratch, self._compiler_files),
                start_new_session=True,  # a group of its own: its compilers end with it
            )

    def _request(self, task: str, scratch: Path, device: str) -> dict[str, object]:
        return {
            "program": str(scratch / _PROGRAM),
            "graph": str(scratch / _GRAPH),
            "backend": self._backend,
            "device": device,
            "task": task,
        }

    def _ask(self, request: Mapping[str, object]) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise WorkerLostError("The worker was ended.")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except (OSError, ValueError) as exc:
            raise worker_lost_error(self._last_words()) from exc

    def _read_answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._next_line(timeout_s)
        except queue.Empty:
            self._end()
            # The machine may be busy or asleep, so the program is not blamed.
            raise WorkerKilledError(f"The build took longer than {timeout_s:.0f} s.") from None
        if line is None:
            words = self._last_words()
            self._end()
            raise worker_lost_error(words)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _next_line(self, timeout_s: float) -> str | None:
        """Return the next line, or None at the end of the process; raises `queue.Empty`."""
        while True:
            start = time.monotonic()
            try:
                return self._answers.get(timeout=min(timeout_s, _LOOK_AT_PACE_S))
            except queue.Empty:
                pace = 1.0 if self._pace is None else self._pace(self._device)
                timeout_s -= pace * (time.monotonic() - start)
                if timeout_s <= 0:
                    raise

    def _last_words(self) -> str:
        process = self._process
        if process is None:
            return "it was ended"
        code = process.wait()
        log = self._scratch / "log" if self._scratch else None
        # In the encoding of the system, in which the worker has written it.
        said = log.read_text(encoding="locale", errors="replace") if log and log.exists() else ""
        return last_words(code, said.splitlines())


def _pump(process: subprocess.Popen[str], answers: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put(None)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()

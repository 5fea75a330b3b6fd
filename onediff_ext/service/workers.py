"""Worker processes that build graphs, seen from the process that draws pictures."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import onediff_ext
from onediff_ext.core.errors import BackendError

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0


class WorkerProcess:
    """One build process, started at the first build and kept for the next ones.

    Args:
        backend: Name of the backend that it builds for.
        cache: Folder for the compiler's own caches; workers may share one.
    """

    def __init__(self, backend: str, cache: Path) -> None:
        self._backend, self._cache = backend, cache
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._scratch: Path | None = None

    def build(self, program: bytes, device: str, timeout_s: float) -> tuple[bytes, float]:
        """Build the graph of an exported program.

        Returns:
            (the graph's bytes, seconds that the build took in the worker).

        Raises:
            BackendError: It cannot be built, took too long, or the worker died.
        """
        try:
            scratch = self._start()
            source, target = scratch / "program.pt2", scratch / "graph.bin"
            source.write_bytes(program)
            request = {
                "program": str(source),
                "output": str(target),
                "backend": self._backend,
                "device": device,
            }
            answer = self._ask(request, timeout_s)
            if "error" in answer:
                if answer.get("spent"):
                    self.close()  # the next build starts another process
                raise BackendError(str(answer["error"]))
            payload = target.read_bytes()
            target.unlink()
        except OSError as exc:
            self.close()
            raise BackendError(
                f"A build cannot work in {self._cache} ({exc.strerror or exc}).",
                "Free some space there, or set TMPDIR to another folder.",
            ) from exc
        return payload, float(str(answer["seconds"]))

    def close(self) -> None:
        """End the worker and its compilers, at once, and remove what they left."""
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process)
            process.wait()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    def _start(self) -> Path:
        if self._process is not None and self._process.poll() is None and self._scratch:
            return self._scratch
        self.close()
        self._scratch = Path(tempfile.mkdtemp(prefix="worker-", dir=self._cache))
        self._answers = queue.SimpleQueue()
        with (self._scratch / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "onediff_ext.backends.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(self._cache),
                start_new_session=True,  # a group of its own: its compilers end with it
            )
        threading.Thread(
            target=_pump, args=(self._process, self._answers), name="onediff-worker", daemon=True
        ).start()
        self._read_answer(_START_TIMEOUT_S)
        return self._scratch

    def _ask(self, request: dict[str, str], timeout_s: float) -> dict[str, object]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise BackendError(f"The build worker died: {self._last_words()}") from exc
        return self._read_answer(timeout_s)

    def _read_answer(self, timeout_s: float) -> dict[str, object]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise BackendError(f"The build took longer than {timeout_s:.0f} s.") from None
        if line is None:
            words = self._last_words()
            self.close()
            raise BackendError(f"The build worker died: {words}")
        answer: dict[str, object] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        log = self._scratch / "log" if self._scratch else None
        lines = log.read_text(errors="replace").splitlines() if log and log.exists() else []
        return lines[-1] if lines else f"exit code {code}"


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


def _environment(cache: Path) -> dict[str, str]:
    package_root = str(Path(onediff_ext.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package_root, *([inherited] if inherited else [])]),
        # Not the user's cache: nothing is left behind, and nothing old is found.
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # several workers share the cores already
    }

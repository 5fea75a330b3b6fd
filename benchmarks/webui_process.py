"""A WebUI as a process of a benchmark: it is started, stopped, and has caches of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.webui_client import WebUI, WebUIError

_POLL_S = 0.25
_STOPS_WITHIN_S = 15
# All of these hosts print it when their page and their API are there.
_STARTED = b"Startup time: "


class WebUIProcess:
    """A checkout's own launcher with this extension, over and over.

    Args:
        checkout: The WebUI's folder.
        flags: Its command line, without the port.
        port: Of its API on this machine.
        caches: Folder for the graphs of this extension and for those of ``torch.compile``. An
            empty one is a first start; with the same one again, it is a restart.
        log: File for what the WebUI prints; it is continued.
        environment: More environment variables.
        runner: Arguments of Python that run the launcher, e.g. ``("-m", "benchmarks.x")``.
    """

    def __init__(
        self,
        checkout: Path,
        flags: Sequence[str],
        port: int,
        caches: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        runner: Sequence[str] = (),
    ) -> None:
        self.log = log
        self.webui = WebUI(f"http://127.0.0.1:{port}", checkout)
        self._checkout = checkout
        launcher = [sys.executable, *runner, "launch.py"]
        self._command = [*launcher, "--api", "--port", str(port), *flags]
        self._environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(caches),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, limit_s: float) -> float:
        """Start it and wait until its scripts can be asked.

        Returns:
            Seconds until then.

        Raises:
            WebUIError: Another process has the port, it has ended, or it has not come up in time.
        """
        if self._answers():
            raise WebUIError(f"another WebUI answers at {self.webui.url}")
        started = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            begin = log.tell()
            self._process = subprocess.Popen(
                self._command,
                cwd=self._checkout,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its build workers end with it
            )
        while not self._has_started(begin) or not self._answers():
            if self._process.poll() is not None:
                raise WebUIError(f"the WebUI has ended, see {self.log}")
            if time.monotonic() - started > limit_s:
                self.stop()
                raise WebUIError(f"the WebUI is not up after {limit_s:.0f} s, see {self.log}")
            time.sleep(_POLL_S)
        return time.monotonic() - started

    def stop(self) -> None:
        """End it and all of its processes; graphs are on the disk by then."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOPS_WITHIN_S)
        self._process = None

    def _has_started(self, begin: int) -> bool:
        """Whether its log says so. A1111 does not survive a request before."""
        with self.log.open("rb") as log:
            log.seek(begin)
            return _STARTED in log.read()

    def _answers(self) -> bool:
        try:
            return self.webui.has("/onediff/v1/version")
        except OSError:
            return False

"""Starts the same WebUI once more, without a page, on another GPU, and talks to it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from onediff_ext.pictures.batch.batch_drawer import DrawerLostError
from onediff_ext.webui.other_gpus.messages import (
    VARIABLE,
    Draw,
    Drawn,
    End,
    Failed,
    Interrupt,
    Layout,
    Ready,
)

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_END_S = 20.0
_INTERRUPT_S = 60.0  # until a job that was interrupted has to answer
_LOG_CHARACTERS = 2000
# Of the host's command line: what is for its page, its server, its GPU and its preparation.
_WITH_VALUE = frozenset(
    {
        "--port", "--server-name", "--gradio-auth", "--gradio-auth-path", "--api-auth", "--ngrok",
        "--ngrok-options", "--ngrok-region", "--subpath", "--tls-keyfile", "--tls-certfile",
        "--device-id", "--gpu-device-id", "--cors-allow-origins", "--cors-allow-origins-regex",
    }
)  # fmt: skip
_ALONE = frozenset(
    {
        "--listen", "--share", "--autolaunch", "--api", "--api-log", "--nowebui",
        "--add-stop-route", "--api-server-stop", "--disable-tls-verify", "--skip-install",
        "--skip-prepare-environment", "--skip-python-version-check", "--reinstall-torch",
        "--reinstall-xformers", "--update-all-extensions", "--update-check",
    }
)  # fmt: skip
_ADDED = (
    "--nowebui", "--server-name=127.0.0.1", "--skip-prepare-environment", "--skip-install",
    "--skip-python-version-check",
)  # fmt: skip


class HostProcess:
    """A WebUI of its own on another GPU. Methods are called in one thread.

    Args:
        gpu: For its ``CUDA_VISIBLE_DEVICES``; None where there is no GPU.
        command: From `host_command`.
    """

    def __init__(self, gpu: str | None, command: Sequence[str]) -> None:
        self._gpu, self._command = gpu, list(command)
        self._connection: Connection[Any, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    def start(self, is_wanted: Callable[[], bool]) -> Layout | None:
        """Start the process and wait until it can draw.

        Returns:
            The layout of its scripts; None when it is not wanted any more.

        Raises:
            DrawerLostError: It ended before.
        """
        key = secrets.token_bytes(32)
        # A socket in a folder of this user alone, or a pipe on Windows.
        with Listener(authkey=key) as listener:
            where = {"address": listener.address, "key": key.hex()}
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
            self._process = subprocess.Popen(
                [*self._command, f"--port={_free_port()}"],
                env=self._environment(where),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
            with _Accepting(listener, key) as accepting:
                while (connection := accepting.connection(_LOOK_S)) is None:
                    if not is_wanted():
                        return None
                    if self._process.poll() is not None:
                        raise self._ended()
        self._connection = connection
        ready = self._answer(lambda: not is_wanted())
        if ready is None:
            return None
        assert isinstance(ready, Ready)
        return ready.layout

    def draw(self, message: Draw, is_stopped: Callable[[], bool]) -> Drawn | None:
        """Have a job drawn.

        Args:
            message: The job.
            is_stopped: Whether the user has stopped the run.

        Returns:
            None when it was stopped.

        Raises:
            DrawerLostError: The job failed there, or the process has ended.
        """
        self._send(message)
        answer = self._answer(is_stopped)
        if answer is None:
            self._send(Interrupt())
            answer = self._answer(lambda: False, _INTERRUPT_S)
            return None
        if isinstance(answer, Failed):
            raise DrawerLostError(answer.reason)
        assert isinstance(answer, Drawn)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        with contextlib.suppress(DrawerLostError):
            if self._connection is not None:
                self._send(End())
            else:
                self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._log.close()

    def _environment(self, where: dict[str, Any]) -> dict[str, str]:
        environment = {**os.environ, VARIABLE: json.dumps(where)}
        # Its API is for nobody; other users of the machine cannot read a process's environment.
        environment["COMMANDLINE_ARGS"] = f"--api-auth=onediff:{secrets.token_hex(16)}"
        if self._gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpu
        return environment

    def _ended(self) -> DrawerLostError:
        """Return the error for a process that has ended, and show the end of what it has said."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LOOK_S)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()
        logger.warning("A WebUI on another GPU said last:\n%s", said[-_LOG_CHARACTERS:])
        return DrawerLostError(f"the WebUI there has ended ({self._process.returncode})")

    def _send(self, message: object) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except (OSError, ValueError) as exc:
            raise DrawerLostError(f"the WebUI there does not answer: {exc}") from exc

    def _answer(self, is_stopped: Callable[[], bool], limit_s: float | None = None) -> Any:
        """Return the next message; None when the run is stopped or the time is over."""
        assert self._connection is not None
        waited_s = 0.0
        while True:
            try:
                if self._connection.poll(_LOOK_S):
                    return pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError) as exc:
                raise self._ended() from exc
            waited_s += _LOOK_S
            if is_stopped() or (limit_s is not None and waited_s >= limit_s):
                return None


class _Accepting:
    """Waits for the first connection in a thread, which ends with the block.

    Args:
        listener: Where the other process connects.
        key: Of the listener.
    """

    def __init__(self, listener: Listener, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._accepted: Future[Connection[Any, Any]] = Future()
        self._thread = threading.Thread(target=self._accept, name="onediff-accept", daemon=True)

    def __enter__(self) -> _Accepting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():  # it waits for a connection, so here is one
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                Client(self._listener.address, authkey=self._key).close()
        self._thread.join()

    def connection(self, timeout_s: float) -> Connection[Any, Any] | None:
        """Return the connection, or None when there is none after some seconds.

        Raises:
            DrawerLostError: A process has connected that does not know the key.
        """
        try:
            return self._accepted.result(timeout_s)
        except FutureTimeout:  # before Python 3.11 another class than TimeoutError
            return None
        except (OSError, EOFError, AuthenticationError) as exc:
            raise DrawerLostError(f"the WebUI there cannot be reached: {exc}") from exc

    def _accept(self) -> None:
        try:
            self._accepted.set_result(self._listener.accept())
        except BaseException as exc:
            self._accepted.set_exception(exc)


def host_command(launcher: Path) -> list[str]:
    """Return the command that starts this WebUI again, without its page and server options.

    Args:
        launcher: The host's `launch.py`, for a process that was started in another way.
    """
    started = sys.argv[0]
    before = sys.orig_argv[1:]
    prefix = before[: before.index(started) + 1] if started in before else [str(launcher)]
    return [sys.executable, *prefix, *_kept(sys.argv[1:]), *_ADDED]


def _kept(flags: Sequence[str]) -> list[str]:
    kept: list[str] = []
    is_value = False
    for flag in flags:
        if is_value:
            is_value = False
        elif flag.split("=", 1)[0] in _WITH_VALUE:
            is_value = "=" not in flag
        elif flag not in _ALONE:
            kept.append(flag)
    return kept


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port

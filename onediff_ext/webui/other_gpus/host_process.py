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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, BinaryIO

from onediff_ext.core.child_processes import wait_or_kill
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
_EXIT_S = 2.0  # for a process or thread that ends
_END_S = 20.0
_INTERRUPT_S = 60.0  # until a job that was interrupted has to answer
_LOG_CHARACTERS = 2000
# Of the host's command line: what is for its page, its server, its GPU and its preparation.
_WITH_VALUE = frozenset(
    {
        "--port", "--server-name", "--gradio-auth", "--gradio-auth-path", "--api-auth", "--ngrok",
        "--ngrok-options", "--ngrok-region", "--subpath", "--tls-keyfile", "--tls-certfile",
        "--device-id", "--gpu-device-id", "--vae-device", "--text-enc-device",
        "--cors-allow-origins", "--cors-allow-origins-regex",
        "--ui-settings-file", "--ui-config-file",
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
    "--skip-python-version-check", "--no-prompt-history",
)  # fmt: skip


class HostProcess:
    """A WebUI of its own on another GPU. Methods are called in one thread.

    Args:
        gpu: For its ``CUDA_VISIBLE_DEVICES``; None where there is no GPU.
        command: From `host_command`.
        options: The host's ``shared.opts.data``: it starts with these settings.
    """

    def __init__(self, gpu: str | None, command: Sequence[str], options: Mapping[str, Any]) -> None:
        self._gpu, self._command, self._options = gpu, list(command), options
        self._connection: Connection[Any, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, is_wanted: Callable[[], bool]) -> Layout | None:
        """Start the process and wait until it can draw.

        Returns:
            The layout of its scripts; None when it is not wanted any more.

        Raises:
            DrawerLostError: It ended before, or cannot be started.
        """
        try:
            return self._start(is_wanted)
        except OSError as exc:  # no room for its files, no memory
            raise DrawerLostError(f"no WebUI can be started there: {exc}") from exc

    def _start(self, is_wanted: Callable[[], bool]) -> Layout | None:
        key = secrets.token_bytes(32)
        # A socket in a folder of this user alone, or a pipe on Windows.
        with Listener(authkey=key) as listener:
            where = {"address": listener.address, "key": key.hex()}
            with self._new_folder() as log:
                self._process = subprocess.Popen(
                    [*self._command, *self._own_files(), f"--port={_free_port()}"],
                    env=self._environment(where),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            with _Accepting(listener) as accepting:
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
            self._answer(lambda: False, _INTERRUPT_S)  # half-drawn pictures are not results
            return None
        if isinstance(answer, Failed):
            raise DrawerLostError(answer.reason)
        assert isinstance(answer, Drawn)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._end(self._process)
        if self._folder is not None:
            self._folder.cleanup()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(DrawerLostError):
            if self._connection is not None:
                self._send(End())
            else:
                process.terminate()
        wait_or_kill(process, _END_S)
        if self._connection is not None:
            self._connection.close()

    def _new_folder(self) -> BinaryIO:
        """Make the folder of its files; returns the log, open for writing."""
        # Windows keeps files of a process that has just ended for a moment.
        self._folder = tempfile.TemporaryDirectory(prefix="onediff-", ignore_cleanup_errors=True)
        settings = {**self._options, "restore_config_state_file": ""}
        path = Path(self._folder.name) / "config.json"
        path.write_text(json.dumps(settings, default=str), encoding="utf-8")
        return (Path(self._folder.name) / "log.txt").open("wb")

    def _own_files(self) -> list[str]:
        """Flags for files that the host writes: the user's stay as they are."""
        assert self._folder is not None
        folder = Path(self._folder.name)
        return [
            f"--ui-settings-file={folder / 'config.json'}",
            f"--ui-config-file={folder / 'ui-config.json'}",
        ]

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
            self._process.wait(_EXIT_S)
        assert self._folder is not None
        log = Path(self._folder.name) / "log.txt"
        said = log.read_bytes().decode(errors="replace").strip()
        logger.warning("A WebUI on another GPU said last:\n%s", said[-_LOG_CHARACTERS:])
        return DrawerLostError(f"the WebUI there has ended ({self._process.returncode})")

    def _send(self, message: object) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except Exception as exc:  # scripts may have changed what was checked
            raise DrawerLostError(f"a batch cannot be sent there: {exc}") from exc

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
            except Exception as exc:
                raise DrawerLostError(f"its answer cannot be read: {exc}") from exc
            waited_s += _LOOK_S
            if is_stopped() or (limit_s is not None and waited_s >= limit_s):
                return None


class _Accepting:
    """Waits for the first connection in a thread, which ends with the block.

    Args:
        listener: Where the other process connects.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._accepted: Future[Connection[Any, Any]] = Future()
        self._thread = threading.Thread(target=self._accept, name="onediff-accept", daemon=True)

    def __enter__(self) -> _Accepting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._accepted.done():  # it may wait for a connection, so here is one
            with contextlib.suppress(OSError):
                Client(self._listener.address).close()  # without the key, so it waits for nothing
        self._thread.join(_EXIT_S)

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
        return int(free.getsockname()[1])

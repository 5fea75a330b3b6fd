"""Ray itself: imported when it is needed, started for this machine or joined."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import site
import socket
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onediff_ext
from onediff_ext.core.errors import ClusterError, OneDiffError, OptionError

_CONNECT_LIMIT_S = 5.0
_HOST_AND_PORT = re.compile(r"(?P<host>[^/]+):(?P<port>[0-9]{1,5})")
_STORE_BYTES = 100 * 2**20  # pictures never travel through Ray; graphs do, some 10 MB each


def import_ray() -> Any:
    """Return the module `ray`.

    Raises:
        OptionError: It is not installed.
    """
    # Ray sends usage statistics unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # pictures are what this machine is for
    # All workers have the same error; the first one is told, and Ray would print the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        import ray
    except ImportError as exc:
        raise OptionError(
            "Several GPUs need Ray.", 'Install it: pip install "onediff-ext[cluster]"'
        ) from exc
    return ray


class BackgroundRay:
    """Ray, started or joined in a thread while the caller does something else.

    The thread lives until `close`: on Linux, Ray's processes end with the thread that starts them.

    Until Ray is ready, the current folder may be another one: use absolute paths.

    Args:
        address: Of a cluster that runs, such as ``10.0.0.1:6379`` or ``auto``; None starts Ray for
            this machine and ends it at `close`.
        workers: On a machine without a GPU, how many workers a cluster of its own has room for.
        delay_s: Ray is started after this time, unless `ready` asks for it before. So a command
            that has nothing to do starts none.
        on_ready: Called in the thread with the module `ray`.
    """

    def __init__(
        self,
        address: str | None,
        workers: int | None = None,
        *,
        delay_s: float = 0.0,
        on_ready: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._address, self._workers = address, workers
        self._delay_s, self._on_ready = delay_s, on_ready
        self._is_wanted, self._is_ready = threading.Event(), threading.Event()
        self._is_over = threading.Event()
        self._ray: Any = None
        self._error: BaseException | None = None
        # A daemon, so that a second Ctrl-C does not wait for it.
        self._thread = threading.Thread(target=self._own, name="onediff-ray", daemon=True)
        self._thread.start()

    def ready(self) -> Any:
        """Wait for Ray and return the module.

        Raises:
            OptionError: Ray is not installed.
            ClusterError: The cluster cannot be reached.
        """
        self._is_wanted.set()
        while not self._is_ready.wait(1.0):  # short waits: Ctrl-C is heard on Windows too
            pass
        if self._error is not None:
            raise self._error
        return self._ray

    def close(self) -> None:
        """End Ray if it was started here, or leave the cluster."""
        self._is_over.set()
        self._is_wanted.set()
        # A cluster that is not joined yet has nothing of ours, and may never answer.
        is_joining = self._address is not None and not self._is_ready.is_set()
        self._thread.join(_CONNECT_LIMIT_S if is_joining else None)

    def _own(self) -> None:
        self._is_wanted.wait(self._delay_s)
        if self._is_over.is_set():
            return
        try:
            ray = import_ray()
            with tempfile.TemporaryDirectory(prefix="onediff-ray-") as empty:
                _start(ray, self._address, self._workers, empty)
                try:
                    self._on_ready(ray)
                    self._ray = ray
                    self._is_ready.set()
                    self._is_over.wait()
                finally:
                    ray.shutdown()
        except BaseException as exc:
            self._error = exc
        finally:
            self._is_ready.set()


@contextlib.contextmanager
def connected(address: str | None, workers: int | None = None) -> Iterator[Any]:
    """Use Ray within the ``with`` block.

    Args:
        address, workers: As for `BackgroundRay`.

    Yields:
        The module `ray`.

    Raises:
        OneDiffError: As in `BackgroundRay.ready`.
    """
    background = BackgroundRay(address, workers)
    try:
        yield background.ready()
    finally:
        background.close()


def _start(ray: Any, address: str | None, workers: int | None, empty: str) -> None:
    if address is not None:
        _check_that_somebody_answers(address)
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        # A reachable dashboard would let others run code; nothing here needs it.
        options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        # Ray starts a process for each CPU at once, used or not: with --gpus 2 on 32 cores, 32.
        options |= {"num_cpus": workers or os.cpu_count() or 1, "address": "local"}
    else:
        options["address"] = address
    # Ray would replace the process's `print`, for good, to keep its own progress bars in one piece.
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
    log = logging.getLogger("ray")
    level = log.level
    # It warns that another thread than the main one handles no signals. The command line does.
    log.setLevel(logging.ERROR)
    try:
        # Ray puts the driver's current folder on the import path of its workers, and starts them in
        # it; it may hold modules of any kind. An empty one stands in for it.
        with _current_folder(empty), _import_path_of_workers(is_own=address is None):
            ray.init(**options)
    except OneDiffError:
        raise
    except (ConnectionError, ValueError, RuntimeError, OSError) as exc:
        where = "on this machine" if address is None else f"at {address}"
        raise ClusterError(
            f"Ray cannot be used {where} ({str(exc).strip().splitlines()[0]}).",
            "`ray status` shows a cluster; `ray start --head` starts one.",
        ) from exc
    finally:
        log.setLevel(level)


def _check_that_somebody_answers(address: str) -> None:
    """Raise ClusterError if an address is wrong. Ray itself would try it for many minutes."""
    parts = _HOST_AND_PORT.fullmatch(address)
    if parts is None:
        return  # "auto", and forms that only Ray reads
    try:
        host, port = parts["host"].strip("[]"), int(parts["port"])
        socket.create_connection((host, port), _CONNECT_LIMIT_S).close()
    except (OSError, OverflowError, UnicodeError) as exc:
        raise ClusterError(
            f"No Ray cluster answers at {address} ({getattr(exc, 'strerror', None) or exc}).",
            "`ray status` shows a cluster; `ray start --head` starts one.",
        ) from exc


@contextlib.contextmanager
def _current_folder(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _import_path_of_workers(*, is_own: bool) -> Iterator[None]:
    """Let the workers of a cluster of our own import this package from where it is.

    An installed package is found anyway. A checkout that is not installed is on the driver's path
    only.
    """
    root = str(Path(onediff_ext.__file__).resolve().parents[1])
    if not is_own or root in _installation_folders():
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = root if not before else os.pathsep.join([root, before])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _installation_folders() -> set[str]:
    found = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    return {str(Path(folder).resolve()) for folder in found}

"""Ray itself: imported when it is needed, started for this machine or joined."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from onediff_ext.core.errors import ClusterError, OptionError

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
    try:
        import ray
    except ImportError as exc:
        raise OptionError(
            "Several GPUs need Ray.", 'Install it: pip install "onediff-ext[cluster]"'
        ) from exc
    return ray


@contextlib.contextmanager
def connected(address: str | None, workers: int | None = None) -> Iterator[Any]:
    """Use Ray within the ``with`` block.

    Args:
        address: Of a cluster that runs, such as ``10.0.0.1:6379`` or ``auto``; None starts Ray for
            this machine and ends it afterwards.
        workers: On a machine without a GPU, how many workers a cluster of its own has room for.

    Yields:
        The module `ray`.

    Raises:
        OptionError: Ray is not installed.
        ClusterError: The cluster cannot be reached.
    """
    ray = import_ray()
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        # A reachable dashboard would let others run code; nothing here needs it.
        options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        options |= {"num_cpus": max(workers or 0, os.cpu_count() or 1), "address": "local"}
    else:
        options["address"] = address
    # Ray puts the driver's current folder on the import path of its workers, and starts them in it;
    # it may hold modules of any kind. An empty one stands in for it, as long as Ray lives.
    with tempfile.TemporaryDirectory(prefix="onediff-ray-") as empty:
        try:
            with _current_folder(empty):
                ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError, OSError) as exc:
            where = "on this machine" if address is None else f"at {address}"
            raise ClusterError(
                f"Ray cannot be used {where} ({str(exc).strip().splitlines()[0]}).",
                "`ray status` shows a cluster; `ray start --head` starts one.",
            ) from exc
        try:
            yield ray
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _current_folder(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)

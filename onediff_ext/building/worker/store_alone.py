"""Stores the graphs of a worker whose parent process has ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from onediff_ext.building.build_folder import ALONE_LOCK, remove_stale
from onediff_ext.building.new_graphs import store_new_graph
from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import BuildHistory, GraphLibrary

STORE_ALONE = "store alone"
"""The task that ends a worker, after it has stored what it built before."""
BUILD_ALONE = "build alone"
"""A task to build and store a graph; after the last one the worker ends."""

# The parent frees the kind's build lock when it ends, a moment after the hand-over.
_PARENT_ENDS_WITHIN_S = 60.0
# A build at the lowest priority takes several times as long where other programs compute.
_TIMES_BUSY = 6


class AloneWorker:
    """A worker that outlives its parent. It keeps its own part of the build folder until it ends.

    Args:
        folder: Its part of the build folder.

    Attributes:
        timeout_s: How long the worker may still live. Nobody tells it how busy the processors are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / ALONE_LOCK)
        self._lock.acquire(timeout=0)
        self.timeout_s = 0.0

    def expect(self, request: Mapping[str, Any]) -> None:
        """Allow the time of one more graph.

        Args:
            request: From `BuildContext.store_request`.
        """
        self.timeout_s += _TIMES_BUSY * float(request["timeout_s"])

    def store(self, request: Mapping[str, Any], build_s: float) -> None:
        """Store a graph, unless there is none, or another process has stored one.

        Args:
            request: From `BuildContext.store_request`, with the path of the ``"graph"``.
            build_s: Seconds that its build took.
        """
        _store(request, lambda: {"seconds": build_s}, _PARENT_ENDS_WITHIN_S)

    def build(self, request: Mapping[str, Any], build: Callable[[], Mapping[str, object]]) -> None:
        """Build a graph and store it, unless another process has stored one or builds it.

        Args:
            request: From `BuildContext.store_request`, with the path of the ``"graph"``.
            build: Writes the graph's bytes there, and returns the worker's answer.
        """
        _store(request, build, 0)

    def remove_files(self) -> None:
        """Delete the worker's part of the build folder, and the folder after the last worker."""
        own = self._folder
        os.chdir(own.parent.parent)
        self._lock.release()
        shutil.rmtree(own, ignore_errors=True)
        remove_stale(own.parent.parent)


def _store(
    request: Mapping[str, Any], build: Callable[[], Mapping[str, object]], lock_timeout_s: float
) -> None:
    library = GraphLibrary(Path(request["store"]), int(request["limit_bytes"]))
    key, label, backend = KindKey(request["key"]), request["label"], request["backend"]
    machine = request["machine"]
    try:
        if not library.folder.exists():
            return
        with library.build_lock(key, lock_timeout_s):
            if library.get(key) is not None or "seconds" not in (answer := build()):
                return
            build_s = float(str(answer["seconds"]))
            payload = Path(request["graph"]).read_bytes()
            store_new_graph(
                library, key, payload, label=label, backend=backend, machine=machine,
                build_s=build_s,
            )  # fmt: skip
        BuildHistory(library.folder).record_build(machine, backend, label, build_s)
    except (OneDiffError, OSError) as exc:  # nobody is left to tell but the log
        print(f"The graph is not kept: {exc}")

"""Stores the graph of a worker whose parent process has ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
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

# The parent frees the kind's build lock when it ends, a moment after the hand-over.
_PARENT_ENDS_WITHIN_S = 60.0
# A build at the lowest priority takes several times as long where other programs compute.
_TIMES_BUSY = 6


class AloneWorker:
    """A worker that outlives its parent. It keeps its own part of the build folder until it ends.

    Args:
        request: From `BuildContext.store_request`, with the path of the ``"graph"``.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request, self._graph = request, Path(request["graph"])
        self._lock = FileLock(self._graph.parent / ALONE_LOCK)
        self._lock.acquire(timeout=0)

    @property
    def timeout_s(self) -> float:
        """How long the worker may still live. Nobody tells it how busy the processors are."""
        return _TIMES_BUSY * float(self._request["timeout_s"])

    def store(self, build_s: float) -> None:
        """Store the graph, unless there is none, or another process has stored one.

        Args:
            build_s: Seconds that its build took.
        """
        request = self._request
        library = GraphLibrary(Path(request["store"]), int(request["limit_bytes"]))
        key, label, backend = KindKey(request["key"]), request["label"], request["backend"]
        machine = request["machine"]
        try:
            payload = self._graph.read_bytes()
            if not library.folder.exists():
                return
            with library.build_lock(key, _PARENT_ENDS_WITHIN_S):
                if library.get(key) is not None:
                    return
                store_new_graph(
                    library, key, payload, label=label, backend=backend, machine=machine,
                    build_s=build_s,
                )  # fmt: skip
            BuildHistory(library.folder).record_build(machine, backend, label, build_s)
        except (OneDiffError, OSError) as exc:  # nobody is left to tell but the log
            print(f"The graph is not kept: {exc}")

    def remove_files(self) -> None:
        """Delete the worker's part of the build folder, and the folder after the last worker."""
        own = self._graph.parent
        os.chdir(own.parent.parent)
        self._lock.release()
        shutil.rmtree(own, ignore_errors=True)
        remove_stale(own.parent.parent)

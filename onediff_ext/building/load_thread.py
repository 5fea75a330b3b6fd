"""Loads the graphs of one build run in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from onediff_ext.building.build_jobs import Job
from onediff_ext.building.graph_loader import GraphLoader
from onediff_ext.core.errors import BackendError


@dataclass(frozen=True)
class LoadResult:
    """Whether a job's graph is loaded.

    Args:
        job: The job.
        done: False after an error, and when the run was stopped before.
        error: Why it cannot be loaded, or None.
    """

    job: Job
    done: bool
    error: BackendError | None


class LoadThread:
    """Loads one graph after the other.

    Args:
        graph_loader: Loads a graph and takes it into use.
        in_background: Beside pictures, from the next picture on; else at once.
        report: Called in the thread with each result.
        halt: Ends a wait for the foreground when set.
    """

    def __init__(
        self,
        graph_loader: GraphLoader,
        in_background: bool,
        report: Callable[[LoadResult], None],
        halt: threading.Event,
    ) -> None:
        self._graph_loader, self._in_background = graph_loader, in_background
        self._report, self._halt = report, halt
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="onediff-load")

    def prepare(self, device: torch.device) -> None:
        """Do what the first load needs, beside pictures and before there is a graph to load."""
        if self._in_background:
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                self._threads.submit(self._graph_loader.prepare, device, self._halt)

    def submit(self, job: Job, payload: bytes, source: str) -> None:
        """Load a graph.

        Args:
            job: The job that it belongs to.
            payload: The graph's bytes.
            source: ``"built"`` or ``"loaded"``, as in `BlockKind.source`.
        """
        try:
            self._threads.submit(self._load, job, payload, source)
        except RuntimeError:  # the interpreter ends, as a short script does while graphs come in
            self._report(LoadResult(job, False, None))

    def stop(self) -> None:
        """End the thread after the present load."""
        self._threads.shutdown(cancel_futures=True)

    def _load(self, job: Job, payload: bytes, source: str) -> None:
        done, error = False, None
        try:
            done = self._graph_loader.take(
                job.kind, payload, source, in_background=self._in_background, stop=self._halt
            )
        except BackendError as exc:
            error = exc
        except Exception as exc:  # would be lost in the pool, and the run would wait for ever
            error = BackendError(f"{type(exc).__name__}: {exc}")
        self._report(LoadResult(job, done, error))

"""Builds missing kinds in several worker processes and puts them into the store."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from onediff_ext.core.errors import BackendError, OneDiffError, StoreError
from onediff_ext.engine.kinds import Kind
from onediff_ext.engine.port import Backend
from onediff_ext.service.build_folder import BuildFolder
from onediff_ext.service.workers import WorkerProcess
from onediff_ext.store import GraphLibrary, StoreBusyError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildProgress:
    """How far a build has come.

    Args:
        done: Kinds finished, failed ones among them.
        needed: Kinds of this build.
        label: What was finished last.
        seconds_left: Estimate from the builds so far.
    """

    done: int
    needed: int
    label: str
    seconds_left: float


ProgressListener = Callable[[BuildProgress], None]
_Built = tuple[bytes, float]  # the graph's bytes, seconds in the worker


class Builder:
    """Builds kinds, each by exactly one of the processes that share a store.

    Exports and loads happen on the calling thread, since torch can do only one
    of either at a time in a process; only the compilation is elsewhere.

    Args:
        library: Where graphs are looked for and put.
        backend: Who builds and loads them.
        workers: Processes at the same time; None for one for every two cores.
        timeout_s: Seconds after which one build counts as hanging.
    """

    def __init__(
        self, library: GraphLibrary, backend: Backend, workers: int | None, timeout_s: float
    ) -> None:
        self._library, self._backend, self._timeout_s = library, backend, timeout_s
        self._worker_count = workers or min(8, max(2, (os.cpu_count() or 2) // 2))
        self.warnings: list[str] = []

    def build(self, kinds: Sequence[Kind], listen: ProgressListener | None = None) -> None:
        """Build each kind, or load it if another process was faster; raises for none of them.

        A kind that cannot be built is marked as failed, with the reason.
        """
        try:
            run = _Run(self, kinds, listen)
        except BackendError as exc:
            for kind in kinds:
                kind.fail(f"could not be built: {exc.message}")
            logger.warning("Nothing can be built: %s", exc)
            return
        with run:
            elsewhere = [kind for kind in kinds if not run.start(kind, lock_timeout_s=0)]
            run.finish_all()
            for kind in elsewhere:  # another process is building these: take over or load
                run.start(kind, lock_timeout_s=self._timeout_s)
                run.finish_all()

    def lock(self, kind: Kind, timeout_s: float) -> AbstractContextManager[None]:
        """The kind's build lock; no lock at all where the store cannot be written."""
        try:
            self._library.folder.prepare()
        except StoreError as exc:
            self.warn(exc)
            return nullcontext()
        return self._library.build_lock(kind.key, timeout_s)

    def load_stored(self, kind: Kind) -> bool:
        """Take the stored graph, if there is one by now."""
        stored = self._library.get(kind.key)
        if stored is None or stored.payload is None:
            return False
        kind.accept(self._backend.load(stored.payload, kind.device), "loaded")
        return True

    def accept(self, kind: Kind, payload: bytes, seconds: float) -> None:
        """Keep a new graph on disk, if that is possible, and take it into use."""
        try:
            self._library.put(
                kind.key,
                payload,
                label=kind.label,
                backend=self._backend.name,
                build_seconds=seconds,
                details={},
            )
        except StoreError as exc:
            self.warn(exc)  # the graph serves this process all the same
        kind.accept(self._backend.load(payload, kind.device), "built")
        logger.info("Built %s in %.1f s", kind.label, seconds)

    def warn(self, exc: StoreError) -> None:
        """Say once that graphs are not kept, and why."""
        text = f"Graphs are not kept: {exc}"
        if text not in self.warnings:
            self.warnings.append(text)
            logger.warning("%s", text)

    def new_workers(self, kinds: int, cache: Path) -> list[WorkerProcess]:
        """As many workers as can be busy at once; none is started yet."""
        count = max(1, min(self._worker_count, kinds))
        return [WorkerProcess(self._backend.name, cache) for _ in range(count)]

    def build_in(self, worker: WorkerProcess, program: bytes, device: str) -> _Built:
        """Build one program in one worker; see `WorkerProcess.build`."""
        return worker.build(program, device, self._timeout_s)


class _Run:
    """One call of `Builder.build`: its workers, its locks, its progress."""

    def __init__(
        self, builder: Builder, kinds: Sequence[Kind], listen: ProgressListener | None
    ) -> None:
        self._builder, self._listen = builder, listen
        self._needed, self._done = len(kinds), 0
        self._folder = BuildFolder()
        self._workers = builder.new_workers(len(kinds), self._folder.path)
        self._idle = list(self._workers)
        self._pool = ThreadPoolExecutor(len(self._workers), thread_name_prefix="onediff-build")
        self._pending: dict[Future[_Built], tuple[Kind, ExitStack]] = {}
        self._started_at = time.monotonic()

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for future, (_, locks) in self._pending.items():
            future.cancel()
            locks.close()
        for worker in self._workers:
            worker.close()  # an interrupted build ends at once
        self._pool.shutdown()
        self._folder.remove()

    def start(self, kind: Kind, lock_timeout_s: float) -> bool:
        """Begin one kind. Returns False when another process is building it."""
        with ExitStack() as locks:
            try:
                locks.enter_context(self._builder.lock(kind, lock_timeout_s))
                if self._builder.load_stored(kind):
                    self._finished(kind)
                    return True
                program = kind.export()
            except StoreBusyError as exc:
                if lock_timeout_s == 0:
                    return False
                self._failed(kind, exc)
                return True
            except OneDiffError as exc:
                self._failed(kind, exc)
                return True
            future = self._pool.submit(self._build, program, str(kind.device))
            self._pending[future] = (kind, locks.pop_all())
        self._collect(timeout_s=0)
        return True

    def finish_all(self) -> None:
        """Wait until everything begun is done."""
        while self._pending:
            self._collect(timeout_s=None)

    def _build(self, program: bytes, device: str) -> _Built:
        worker = self._idle.pop()
        try:
            return self._builder.build_in(worker, program, device)
        finally:
            self._idle.append(worker)

    def _collect(self, timeout_s: float | None) -> None:
        finished, _ = wait(self._pending, timeout_s, FIRST_COMPLETED)
        for future in finished:
            kind, locks = self._pending.pop(future)
            with locks:
                try:
                    self._builder.accept(kind, *future.result())
                except OneDiffError as exc:
                    self._failed(kind, exc)
                else:
                    self._finished(kind)

    def _failed(self, kind: Kind, exc: OneDiffError) -> None:
        kind.fail(f"could not be built: {exc.message}")
        logger.warning("%s runs eager: %s", kind.label, kind.reason)
        self._finished(kind)

    def _finished(self, kind: Kind) -> None:
        self._done += 1
        if self._listen is not None:
            per_kind = (time.monotonic() - self._started_at) / self._done
            left = per_kind * (self._needed - self._done)
            self._listen(BuildProgress(self._done, self._needed, kind.label, left))

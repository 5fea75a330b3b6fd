"""Kinds on their way to a graph, and the worker processes of one run that make them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from onediff_ext.building.build_folder import BuildFolder, safe_parent
from onediff_ext.building.builder import Builder
from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.core.errors import BackendError, NoMemoryError, OneDiffError
from onediff_ext.core.priority import GivingWay
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.store import StoredGraph


@dataclass(eq=False)
class Job:
    """One kind on its way to a graph.

    Args:
        kind: What it is for.
        locks: Its build lock.
        program: Once it is exported.
        unproved: A stored graph that was never loaded on this machine.
        attempts: Worker processes that failed over it.
        faults: Those of them that nobody had killed.
        started_at: When its worker took it; monotonic.
        reason: Why it is built.
        news: What to note once its graph is loaded, as (event, reason).
    """

    kind: BlockKind
    locks: ExitStack
    program: bytes = b""
    unproved: StoredGraph | None = None
    attempts: int = 0
    faults: int = 0
    started_at: float = 0.0
    reason: str = ""
    news: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Answer:
    """What became of a job in its worker; a proof has neither payload nor seconds."""

    job: Job
    payload: bytes | None
    seconds: float
    error: OneDiffError | None


@dataclass(frozen=True)
class Loaded:
    """Whether a job's graph is loaded; neither so nor an error when the run was stopped."""

    job: Job
    done: bool
    error: BackendError | None


def seconds_of(
    jobs: Sequence[Job],
    running: Sequence[Job],
    expected: Sequence[float | None],
    spent: Sequence[float],
) -> float | None:
    """Seconds of work that are left, one job after the other; None when nothing is known.

    Args:
        jobs: All that is left.
        running: Those of them that a worker has begun.
        expected: Seconds of each job, from this machine's history.
        spent: Seconds of the builds so far, which stand for what is not expected.
    """
    usual = sum(spent) / len(spent) if spent else None
    now, total = time.monotonic(), 0.0
    for job, seconds in zip(jobs, expected, strict=True):
        seconds = usual if seconds is None else seconds
        if seconds is None:
            return None
        if job in running:
            seconds = max(seconds - (now - job.started_at), 0.1 * seconds)
        total += seconds
    return total


class WorkerPool:
    """The workers of one run, started when they are needed.

    Args:
        builder: Makes them.
        in_background: At a low priority.
        answer: Called with each answer, in a thread of its worker's.

    Attributes:
        folder: Where they work.

    Raises:
        BackendError: There is no place to build in.
    """

    def __init__(
        self, builder: Builder, in_background: bool, answer: Callable[[Answer], None]
    ) -> None:
        self._builder, self._in_background, self._answer = builder, in_background, answer
        self.folder = BuildFolder(safe_parent(builder.library.folder))
        self._workers: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []
        self._giving_way = GivingWay()
        self._threads = ThreadPoolExecutor(builder.worker_count, thread_name_prefix="onediff-build")

    @property
    def pids(self) -> list[int]:
        """The worker processes that live."""
        return [pid for worker in list(self._workers) if (pid := worker.pid) is not None]

    def give_way(self, drawing: bool) -> None:
        """Leave the processors to whoever draws, and take more of them between pictures."""
        for pid in self.pids:
            self._giving_way.tell(pid, drawing)

    def submit(self, job: Job) -> None:
        """Have a job's graph built, or the stored one proved."""
        ticket = [job]
        try:
            self._threads.submit(self._work, ticket)
        except RuntimeError as exc:  # no room for another thread; an older one may have taken it
            if ticket:
                error = NoMemoryError(f"A build cannot begin ({exc}).")
                self._answer(Answer(ticket.pop(), None, 0.0, error))

    def stop(self) -> None:
        """End all workers at once."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def remove(self) -> None:
        """Delete what the workers have left."""
        self.folder.remove()

    def _take(self) -> WorkerProcess:
        try:
            return self._idle.pop()
        except IndexError:
            worker = self._builder.new_worker(self.folder.path, self._in_background)
            self._workers.append(worker)
            return worker

    def _work(self, ticket: list[Job]) -> None:
        try:
            job = ticket.pop()
        except IndexError:
            return
        builder = self._builder
        payload, seconds = None, 0.0
        error: OneDiffError | None = None
        worker: WorkerProcess | None = None
        try:
            worker = self._take()
            if job.attempts:
                worker.renew()
            if job.unproved is not None and job.unproved.payload is not None:
                timeout_s = builder.options.build_timeout_s
                device = str(job.kind.device)
                worker.prove(job.unproved.payload, job.program, device, timeout_s)
            else:
                built = builder.build_in(worker, job.program, str(job.kind.device))
                payload, seconds = built.payload, built.seconds
        except OneDiffError as exc:
            error = exc
        except Exception as exc:  # would be lost in the pool, and the run would wait for ever
            error = BackendError(f"{type(exc).__name__}: {exc}")
        finally:
            if worker is not None:
                self._idle.append(worker)
        self._answer(Answer(job, payload, seconds, error))

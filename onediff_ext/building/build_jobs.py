"""The jobs of one build run, sorted by what each of them waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.store import StoredGraph


@dataclass(eq=False)
class Job:
    """One kind on its way to a graph.

    Args:
        kind: The kind that needs a graph.
        locks: Holds the kind's build lock.
        program: The exported program; empty before the export.
        stored: A stored graph that is used when its load check passes.
        has_passed: Whether `stored` has passed its load check on this machine.
        failed_attempts: Worker processes that failed on this job.
        faults: Those failures that no signal from outside explains.
        started_at: When a worker began; monotonic, in seconds.
        reason: Why a graph is built.
        event: What happened to the graph before its load, as (event, reason); it is logged when
            the load has ended.
    """

    kind: BlockKind
    locks: ExitStack
    program: bytes = b""
    stored: StoredGraph | None = None
    has_passed: bool = False
    failed_attempts: int = 0
    faults: int = 0
    started_at: float = 0.0
    reason: str = ""
    event: tuple[str, str] | None = None


class JobQueues:
    """Every kind of one run is in exactly one of these lists, or finished.

    Args:
        kinds: The first kinds, the most useful first.

    Attributes:
        new: Kinds that are not claimed yet.
        elsewhere: Kinds that another process is building.
        exporting: Jobs without a program, by the id of their kind.
        waiting: Jobs that need a worker.
        working: Jobs in a worker.
        loading: Jobs whose graph is being loaded.
    """

    def __init__(self, kinds: Sequence[BlockKind]) -> None:
        self.new: list[BlockKind] = list(kinds)
        self.elsewhere: list[BlockKind] = []
        self.exporting: dict[int, Job] = {}
        self.waiting: list[Job] = []
        self.working: list[Job] = []
        self.loading: list[Job] = []
        self._seen = {id(kind) for kind in kinds}

    @property
    def kind_count(self) -> int:
        """Kinds of this run, including finished ones."""
        return len(self._seen)

    @property
    def are_busy(self) -> bool:
        """Whether a job is being exported, built or loaded, or waits for that."""
        return bool(self.exporting or self.waiting or self.working or self.loading)

    @property
    def unfinished(self) -> list[Job]:
        """All jobs."""
        return [*self.exporting.values(), *self.waiting, *self.working, *self.loading]

    @property
    def unfinished_kinds(self) -> list[BlockKind]:
        """All kinds without a result."""
        jobs = [*self.waiting, *self.working, *self.loading, *self.exporting.values()]
        return [*(job.kind for job in jobs), *self.elsewhere, *self.new]

    @property
    def kinds_before_workers(self) -> list[BlockKind]:
        """All kinds that no worker has begun, those of other processes too."""
        jobs = [*self.waiting, *self.exporting.values()]
        return [*(job.kind for job in jobs), *self.elsewhere, *self.new]

    def add(self, kinds: Sequence[BlockKind]) -> None:
        """Add kinds; those that this run has seen before are left out."""
        for kind in kinds:
            if id(kind) not in self._seen:
                self._seen.add(id(kind))
                self.new.append(kind)

    def start_export(self, job: Job) -> None:
        """Put a job among those that need a program."""
        self.exporting[id(job.kind)] = job

    def take_exported(self, kind: BlockKind) -> Job | None:
        """Take a kind's job out of the exports; None when it is not there any more."""
        return self.exporting.pop(id(kind), None)

    def take_next(self) -> Job:
        """Move the next waiting job to the workers: jobs without a failure first, of these the
        kind whose graph saves most time."""
        job = min(self.waiting, key=lambda job: (job.failed_attempts, -job.kind.weight))
        self.waiting.remove(job)
        job.started_at = time.monotonic()
        self.working.append(job)
        return job

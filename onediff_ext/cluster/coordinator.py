"""The loop of the driver: keeps workers busy, replaces lost ones, and loses no picture."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onediff_ext.cluster.batch_queue import BatchQueue, Poisoned, Unit
from onediff_ext.cluster.worker_pool import Event, Finished, Lost, Ready, Returned, WorkerPool
from onediff_ext.core.errors import ClusterError

logger = logging.getLogger(__name__)

_AHEAD = 3  # units of a worker: one is read, one drawn, one written
_POLL_S = 0.5
_MOST_FAILED_STARTS = 5


@dataclass
class WorkerState:
    """What the driver knows of a worker.

    Args:
        name: Of the worker.
        about: What it told of itself; empty until its models are loaded.
        units: What it has, by ticket.
        stolen: Tickets that it was asked to give back.
        pictures: Written so far.
        lost: Why it is gone; empty while it works.
    """

    name: str
    about: dict[str, Any] = field(default_factory=dict)
    units: dict[int, Unit] = field(default_factory=dict)
    stolen: set[int] = field(default_factory=set)
    pictures: int = 0
    lost: str = ""
    is_ready: bool = False

    @property
    def has_room(self) -> bool:
        """Whether it may get another unit beside those that it has."""
        return len(self.units) < _AHEAD and not any(unit.alone for unit in self.units.values())


class Coordinator:
    """Runs the batches of a queue on the workers of a pool.

    Args:
        queue: The batches.
        pool: The workers.
        task_of: Makes a unit's task, which travels to the worker.
        on_finished: Called with each unit that is done, its outcome and its worker.
        on_poisoned: Called with each picture that is given up, and the last reason.
        on_tick: Called once in every round, for displays; may raise to stop the run.
        worker_limit: Most workers at the same time; None takes all that the pool has room for.

    Attributes:
        workers: All workers of the run, those that are gone too.
    """

    def __init__(
        self,
        queue: BatchQueue,
        pool: WorkerPool,
        task_of: Callable[[Unit], Any],
        on_finished: Callable[[Unit, Any, WorkerState], None],
        on_poisoned: Callable[[Poisoned, str], None],
        *,
        on_tick: Callable[[], None] = lambda: None,
        worker_limit: int | None = None,
    ) -> None:
        self._queue, self._pool, self._task_of = queue, pool, task_of
        self._on_finished, self._on_poisoned = on_finished, on_poisoned
        self._on_tick, self._limit = on_tick, worker_limit
        self._tickets = itertools.count()
        self._alive: dict[str, WorkerState] = {}
        self._failed_starts = 0
        self._hungry: dict[str, None] = {}  # they have room, and the queue had nothing for them
        self.workers: list[WorkerState] = []

    def run(self) -> None:
        """Run until every picture is written or given up.

        Raises:
            ClusterError: No worker can be started.
            OneDiffError: An error that every worker would have, such as a full disk.
        """
        while not self._queue.is_finished:
            self._start_workers()
            self._steal()
            for event in self._pool.events(_POLL_S):
                self._handle(event)
            self._on_tick()

    def _start_workers(self) -> None:
        room = self._pool.room()
        if self._limit is not None:
            room = min(room, self._limit - len(self._alive))
        for _ in range(room):
            worker = WorkerState(self._pool.start())
            self._alive[worker.name] = worker
            self.workers.append(worker)

    def _feed(self, worker: WorkerState) -> None:
        while worker.is_ready and worker.has_room:
            unit = self._queue.take(worker.name, idle=not worker.units)
            if unit is None:
                self._hungry[worker.name] = None
                return
            self._hungry.pop(worker.name, None)
            ticket = next(self._tickets)
            worker.units[ticket] = unit
            self._pool.submit(worker.name, ticket, self._task_of(unit))

    def _steal(self) -> None:
        """An idle worker gets what the busiest one has not begun."""
        if not any(not self._alive[name].units for name in self._hungry):
            return
        ready = [worker for worker in self._alive.values() if worker.is_ready]
        idle = sum(not worker.units for worker in ready)
        idle -= sum(len(worker.stolen) for worker in ready)
        while idle > 0:
            victim = max(ready, key=lambda worker: len(worker.units) - len(worker.stolen))
            waiting = [ticket for ticket in victim.units if ticket not in victim.stolen]
            if len(waiting) < 2:
                return
            victim.stolen.add(waiting[-1])
            self._pool.steal(victim.name, waiting[-1])
            idle -= 1

    def _handle(self, event: Event) -> None:
        worker = self._alive.get(event.worker)
        if worker is None:
            return  # an answer of a worker that was given up
        if isinstance(event, Ready):
            worker.is_ready, worker.about = True, event.about
            self._failed_starts = 0
        elif isinstance(event, Lost):
            self._lose(worker, event)
            return
        elif isinstance(event, Returned):
            worker.stolen.discard(event.ticket)
            self._queue.give_back(worker.units.pop(event.ticket))
            self._feed_hungry()
        elif isinstance(event, Finished):
            self._finish(worker, event)
        self._feed(worker)

    def _finish(self, worker: WorkerState, event: Finished) -> None:
        worker.stolen.discard(event.ticket)
        unit = worker.units.pop(event.ticket)
        self._queue.done(unit)
        self._on_finished(unit, event.outcome, worker)

    def _feed_hungry(self) -> None:
        """Hand out what came back, to idle workers first."""
        hungry = [self._alive[name] for name in self._hungry]
        for worker in sorted(hungry, key=lambda worker: len(worker.units)):
            self._feed(worker)

    def _lose(self, worker: WorkerState, event: Lost) -> None:
        del self._alive[worker.name]
        self._hungry.pop(worker.name, None)
        self._queue.forget(worker.name)
        for done in event.finished:
            self._finish(worker, done)
        worker.lost = event.reason
        logger.info("Worker %s is lost: %s", worker.name, event.reason)
        if event.error is not None:
            raise event.error
        if not worker.is_ready and not event.is_node:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise ClusterError(
                    f"Workers end before they have loaded the models ({event.reason}).",
                    "Run the same command without --gpus and --cluster to see why.",
                )
        for ticket, unit in worker.units.items():
            if event.is_node or (event.ticket is not None and ticket != event.ticket):
                self._queue.give_back(unit)
                continue
            for poisoned in self._queue.killed(unit):
                self._on_poisoned(poisoned, event.reason)
        worker.units.clear()
        self._feed_hungry()


def start_all(pool: WorkerPool, limit: int | None = None) -> list[WorkerState]:
    """Start a worker on each GPU and wait until all have opened their program.

    Args:
        pool: The workers.
        limit: Most workers; None takes all.

    Raises:
        ClusterError: There is no GPU, or a worker was lost.
        OneDiffError: The program cannot be opened.
    """
    room = pool.room()
    count = room if limit is None else min(room, limit)
    if count < 1:
        raise ClusterError("The cluster has room for no worker.", "`ray status` shows its GPUs.")
    workers = {name: WorkerState(name) for name in (pool.start() for _ in range(count))}
    while not all(worker.is_ready for worker in workers.values()):
        for event in pool.events(_POLL_S):
            if isinstance(event, Ready):
                worker = workers[event.worker]
                worker.is_ready, worker.about = True, event.about
            elif isinstance(event, Lost):
                raise event.error or ClusterError(
                    f"A worker was lost ({event.reason}).", "Run the same command again."
                )
    return list(workers.values())

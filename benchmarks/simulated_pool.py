"""Workers that take no time: a pool with a clock of its own, for the simulation and for tests."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from onediff_ext.cluster.worker_pool import Event, Finished, Lost, Ready, Returned, WorkerPool


class SimulatedPool(WorkerPool):
    """Each worker does its units one after the other, each in a random time.

    Args:
        workers: Most workers at the same time.
        seconds: Returns the time of a task.
        start_s: Time until a worker has its models.
        fatal: Tells whether a task kills its worker.
        seed: Of the times.

    Attributes:
        now_s: The simulated time.
        busy_s: Time in which workers drew, summed.
        done: Number of finished tasks.
    """

    def __init__(
        self,
        workers: int,
        seconds: Callable[[Any, random.Random], float],
        *,
        start_s: float = 30.0,
        fatal: Callable[[Any], bool] = lambda _: False,
        seed: int = 0,
    ) -> None:
        self._most, self._seconds, self._start_s = workers, seconds, start_s
        self._fatal, self._random = fatal, random.Random(seed)
        self._names = itertools.count(1)
        self._order = itertools.count()
        self._alive: dict[str, dict[int, float]] = {}  # worker → ticket → when it begins
        self._free_at: dict[str, float] = {}
        self._events: list[tuple[float, int, Event]] = []
        self.now_s = self.busy_s = 0.0
        self.done = 0

    def room(self) -> int:
        return self._most - len(self._alive)

    def start(self) -> str:
        name = f"worker-{next(self._names)}"
        self._alive[name], self._free_at[name] = {}, self.now_s + self._start_s
        self._push(self._free_at[name], Ready(name, {"device": "simulated"}))
        return name

    def submit(self, worker: str, ticket: int, task: Any) -> None:
        begins = max(self.now_s, self._free_at[worker])
        took = self._seconds(task, self._random)
        self._alive[worker][ticket] = begins
        self._free_at[worker] = begins + took
        if self._fatal(task):
            self._push(begins + took, Lost(worker, "killed by a task"))
        else:
            self.busy_s += took
            self._push(begins + took, Finished(worker, ticket, task))

    def steal(self, worker: str, ticket: int) -> None:
        if self._alive[worker].get(ticket, 0.0) <= self.now_s:
            return  # it has begun
        del self._alive[worker][ticket]
        for index, (at, order, event) in enumerate(self._events):
            if event.worker == worker and getattr(event, "ticket", None) == ticket:
                self.busy_s -= self._free_at[worker] - at if at < self._free_at[worker] else 0.0
                self._free_at[worker] = min(self._free_at[worker], at)
                self._events[index] = (self.now_s, order, Returned(worker, ticket))
                heapq.heapify(self._events)
                return

    def events(self, timeout_s: float) -> Sequence[Event]:  # noqa: ARG002 - nobody waits here
        found: list[Event] = []
        while self._events and (not found or self._events[0][0] <= self.now_s):
            at, _, event = heapq.heappop(self._events)
            if event.worker not in self._alive:
                continue
            self.now_s = max(self.now_s, at)
            if isinstance(event, Lost):
                del self._alive[event.worker]
            elif isinstance(event, Finished):
                self.done += 1
                self._alive[event.worker].pop(event.ticket, None)
            found.append(event)
        return found

    def close(self) -> None:
        self._alive.clear()

    def kill(self, worker: str) -> None:
        """Let a worker die now."""
        self._push(self.now_s, Lost(worker, "killed"))

    @property
    def alive(self) -> list[str]:
        """The names of the workers."""
        return list(self._alive)

    def _push(self, at: float, event: Event) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

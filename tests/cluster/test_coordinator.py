"""The driver's loop with simulated workers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from benchmarks.cluster_simulation import simulate
from benchmarks.simulated_pool import SimulatedPool
from onediff_ext.cluster.batch_queue import BatchQueue, Poisoned, Unit
from onediff_ext.cluster.coordinator import Coordinator, WorkerState
from onediff_ext.core.errors import ClusterError


def one_second(task: Unit, chance: random.Random) -> float:
    return float(len(task.positions))


class Run:
    """One run of the loop; keeps what was written and poisoned."""

    def __init__(self, pool: SimulatedPool, sizes: list[int], limit: int | None = None) -> None:
        self.written: Counter[tuple[int, int, int]] = Counter()
        self.poisoned: list[Poisoned] = []
        self.coordinator = Coordinator(
            BatchQueue(sizes, [4] * len(sizes)),
            pool,
            lambda unit: unit,
            self.finished,
            lambda poisoned, reason: self.poisoned.append(poisoned),
            worker_limit=limit,
        )
        self.coordinator.run()

    def finished(self, unit: Unit, outcome: Any, worker: WorkerState) -> None:
        assert outcome == unit
        if unit.writes:
            self.written.update((unit.group, unit.batch, position) for position in unit.positions)
            worker.pictures += len(unit.positions)


def test_all_workers_share_the_work() -> None:
    run = Run(SimulatedPool(4, one_second), [40, 40, 40])
    assert sum(run.written.values()) == len(run.written) == 120
    assert len(run.coordinator.workers) == 4
    assert all(worker.pictures >= 20 for worker in run.coordinator.workers)


def test_the_limit_holds() -> None:
    run = Run(SimulatedPool(4, one_second), [12], limit=2)
    assert len(run.coordinator.workers) == 2


def test_an_idle_worker_takes_what_another_has_not_begun() -> None:
    def seconds(task: Unit, chance: random.Random) -> float:
        return 100.0 if task.batch == 0 else 1.0

    pool = SimulatedPool(2, seconds)
    Run(pool, [24])  # the worker with batch 0 has two more waiting
    assert pool.now_s <= 30 + 101


def test_a_poisoned_picture_is_reported_and_all_others_are_written() -> None:
    def fatal(task: Unit) -> bool:
        return task.batch == 3 and 1 in task.positions

    run = Run(SimulatedPool(3, one_second, fatal=fatal), [40])
    assert run.poisoned == [Poisoned(0, 3, 1)]
    assert len(run.written) == 39
    assert set(run.written.values()) == {1}


def test_workers_that_never_start_end_the_run() -> None:
    class Broken(SimulatedPool):
        def start(self) -> str:
            name = super().start()
            self._events.clear()
            self.kill(name)
            return name

    with pytest.raises(ClusterError, match="before they have loaded"):
        Run(Broken(2, one_second), [4])


def test_scheduling_is_far_below_a_millisecond_a_picture_and_memory_is_flat() -> None:
    result = simulate(200, 20_000)
    assert result["pictures_written"] == 20_000
    assert result["driver_ms_per_picture"] < 1.0
    memory = result["driver_bytes_after_each_tenth"]
    assert max(memory) < min(memory) + 1_000_000
    assert result["busy_share"] > 0.9

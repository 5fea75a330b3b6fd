"""The driver with very many workers that take no time: what scheduling costs, and its memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

from benchmarks.simulated_pool import SimulatedPool
from onediff_ext.cluster.batch_queue import BatchQueue, Unit
from onediff_ext.cluster.coordinator import Coordinator

_SIZES = 200
_BATCH = 4
_SECONDS = 2.0  # of one picture of 1024x1024 on a GPU, about
_SAMPLES = 10


def simulate(workers: int, pictures: int, *, seed: int = 0, kills: int = 50) -> dict[str, Any]:
    """Run the real queue and the real loop with simulated workers.

    Args:
        workers: Number of workers.
        pictures: Number of pictures, in 200 sizes.
        seed: Of the times and deaths.
        kills: Workers that die on the way.

    Returns:
        Milliseconds of the driver's own work for each picture; its memory after each tenth of the
        run; how long the workers were busy.
    """
    chance = random.Random(seed)
    sizes = [pictures // _SIZES + (n < pictures % _SIZES) for n in range(_SIZES)]
    costs = [chance.uniform(0.25, 4.0) for _ in sizes]

    def seconds(task: Unit, of: random.Random) -> float:
        return costs[task.group] * len(task.positions) * _SECONDS * of.uniform(0.95, 1.05)

    queue = BatchQueue(sizes, [_BATCH] * _SIZES, costs)
    pool = SimulatedPool(workers, seconds, seed=seed)
    written, memory = 0, list[int]()
    begun_at = time.perf_counter()
    kill_at = sorted(chance.uniform(0, 0.95) * pictures for _ in range(kills))

    def finished(unit: Unit, outcome: Any, worker: Any) -> None:
        nonlocal written
        del outcome
        written += len(unit.positions) * unit.writes
        worker.pictures += len(unit.positions)

    def tick() -> None:
        if written >= (len(memory) + 1) * pictures / _SAMPLES:
            memory.append(tracemalloc.get_traced_memory()[0])
        while kill_at and written >= kill_at[0]:
            del kill_at[0]
            pool.kill(chance.choice(pool.alive))

    coordinator = Coordinator(
        queue, pool, lambda unit: unit, finished, lambda *_: None, on_tick=tick
    )
    # Memory is measured in a run of its own, since watching it takes time.
    tracemalloc.start()
    coordinator.run()
    watched_s = time.perf_counter() - begun_at
    tracemalloc.stop()
    queue = BatchQueue(sizes, [_BATCH] * _SIZES, costs)
    fast = SimulatedPool(workers, seconds, seed=seed)
    again = Coordinator(queue, fast, lambda unit: unit, lambda *_: None, lambda *_: None)
    start = time.perf_counter()
    again.run()
    driver_s = time.perf_counter() - start
    end_s = fast.now_s
    return {
        "workers": workers,
        "pictures": pictures,
        "sizes": _SIZES,
        "batch_size": _BATCH,
        "killed": kills,
        "pictures_written": written,
        "driver_seconds": round(driver_s, 3),
        "driver_ms_per_picture": round(driver_s / pictures * 1e3, 5),
        "driver_ms_per_picture_watched": round(watched_s / pictures * 1e3, 5),
        "driver_bytes_after_each_tenth": memory,
        "simulated_hours": round(end_s / 3600, 3),
        "busy_share": round(fast.busy_s / (workers * (end_s - 30.0)), 4),
    }

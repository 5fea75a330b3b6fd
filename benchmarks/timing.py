"""Milliseconds of consecutive calls."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def step_times_ms(call: Callable[[], Any], steps: int, device: torch.device) -> list[float]:
    """Time calls one after the other, as a sampler makes them: nothing waits in between.

    On a GPU the times lie between events in its stream, so they hold whatever is longer of
    Python's work and the GPU's.
    """
    if device.type != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def median_and_p95(values: Sequence[float]) -> tuple[float, float]:
    """The middle value, and the one that one in twenty exceeds."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

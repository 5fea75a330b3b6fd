"""Times work of a device: by the GPU's own clock where it runs there, since Python is ahead."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class Timing(ABC):
    """The seconds that some work takes. Calling it waits until the work has ended."""

    @abstractmethod
    def __call__(self) -> float:
        """Return the seconds; waits for the device."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether the work has ended, so that a call returns at once."""


Stop = Callable[[], Timing]
"""Stops a stopwatch behind the work that was launched so far."""


def stopwatch(device: torch.device) -> Stop:
    """Start a stopwatch behind the work that was launched so far.

    Args:
        device: Where the work runs.

    Returns:
        Stops it.
    """
    if device.type != "cuda":
        began_s = time.perf_counter()
        return lambda: ElapsedTime(time.perf_counter() - began_s)
    stream = torch.cuda.current_stream(device)
    event: Any = torch.cuda.Event  # has no type hints
    first, last = event(enable_timing=True), event(enable_timing=True)
    first.record(stream)

    def stop() -> Timing:
        last.record(stream)
        return _Events(first, last)

    return stop


class ElapsedTime(Timing):
    """The seconds of work that has ended.

    Args:
        seconds: What a call returns.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds

    def is_done(self) -> bool:
        return True


class _Events(Timing):
    def __init__(self, first: Any, last: Any) -> None:
        self._first, self._last = first, last

    def __call__(self) -> float:
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) / 1000

    def is_done(self) -> bool:
        return bool(self._last.query())

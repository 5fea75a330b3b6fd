"""When the steps of a start-up were done, by the wall clock, so that processes can be compared."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

_IMPORTED_AT = time.time()


class StartUpTimes:
    """Notes when each step was done for the first time. Threads may mark.

    Attributes:
        steps: Step → seconds since 1970.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.steps: dict[str, float] = {}

    def mark(self, step: str) -> None:
        """Note that a step is done now, unless it was done before."""
        with self._lock:
            self.steps.setdefault(step, time.time())


def seconds_since(began_at: float, steps: Mapping[str, float]) -> dict[str, float]:
    """Return step → seconds after a moment, earliest first.

    Args:
        began_at: Seconds since 1970; clocks of other machines may differ.
        steps: As in `StartUpTimes`.
    """
    ordered = sorted(steps.items(), key=lambda step: step[1])
    return {step: round(at - began_at, 2) for step, at in ordered}


def process_started_at() -> float:
    """Return when this process began, in seconds since 1970.

    Elsewhere than on Linux that is when this module was imported.
    """
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return _IMPORTED_AT
    return time.time() - age_s

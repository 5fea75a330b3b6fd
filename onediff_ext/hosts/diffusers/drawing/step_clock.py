"""Times the sampling steps of a picture."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch


class StepClock:
    """Times each sampling step, with at most one step queued on the device.

    It waits for the step before the one that was just queued. So the device always has work while
    Python prepares the next step, and a cancel takes effect one step later at most.
    """

    def __init__(self, device: torch.device, on_step: Callable[[int], None]) -> None:
        self._device, self._on_step = device, on_step
        self._ends: list[Any] = []

    def __call__(self, *call: Any) -> dict[str, Any]:
        # diffusers calls it with (pipe, step, timestep, kwargs) and takes kwargs back.
        self._ends.append(self._now())
        if self._device.type == "cuda" and len(self._ends) > 1:
            self._ends[-2].synchronize()
        self._on_step(len(self._ends))
        kwargs: dict[str, Any] = call[-1]
        return kwargs

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        make_event: Any = torch.cuda.Event  # not typed
        event = make_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self) -> list[float]:
        """Return the seconds of each step except the first; the last step must have finished."""
        pairs = itertools.pairwise(self._ends)
        if self._device.type == "cuda":
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]

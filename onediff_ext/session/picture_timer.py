"""Times each picture and the UNet's share of it, to estimate what graphs saved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from onediff_ext.core.shapes import CELL_PX, BatchShape
from onediff_ext.engine.stopwatch import Timing, stopwatch
from onediff_ext.store import StepRecord

# A picture's steps over measured ones, beyond which the two cannot be compared.
_SLOWEST, _FASTEST = 1.5, 0.6


@dataclass(frozen=True)
class PictureTime:
    """The time of one picture, or of one job of several.

    Args:
        seconds: Measured, from the job's begin to its end.
        without_s: Estimate of the same without OneDiff; None where no step of the size was
            measured, or where the machine was much busier or idler then.
        sizes: Of its UNet's steps, such as ``{"512x768@2"}``.
        other_pace: Whether its steps were much slower or faster than the measured ones.
    """

    seconds: float
    without_s: float | None = None
    sizes: frozenset[str] = frozenset()
    other_pace: bool = False


class PictureTimer:
    """Times pictures. One picture is drawn at a time; pictures may be nested.

    Attributes:
        last: The last picture; None before the first, and after one that was interrupted.
    """

    def __init__(self) -> None:
        self.last: PictureTime | None = None
        self._depth = 0
        self._began, self._is_interrupted = 0.0, False
        self._forwards: list[tuple[BatchShape | None, Timing]] = []
        self._last_forwards: list[tuple[BatchShape | None, Timing]] = []

    @property
    def steps_s(self) -> float:
        """Seconds of the last picture's steps, each counted as long as the usual one of its size.

        So a wait in the first step does not count. 0 without steps.
        """
        total_s = 0.0
        for taken in _by_size(self._last_forwards).values():
            total_s += len(taken) * statistics.median(taken)
        return total_s

    def begin(self) -> None:
        """Note that a picture begins."""
        self._depth += 1
        if self._depth == 1:
            self._began, self._forwards = time.perf_counter(), []
            self._is_interrupted = False

    def interrupt(self) -> None:
        """Note that the present picture is not finished: its time says nothing."""
        self._is_interrupted = self._depth > 0

    @contextmanager
    def forward(self, arguments: Iterable[object]) -> Iterator[None]:
        """Time one forward of the UNet within the ``with`` block.

        Args:
            arguments: All arguments of the forward; the first tensor is a latent
                [2B, C, H/8, W/8].
        """
        latent = next((a for a in arguments if isinstance(a, torch.Tensor)), None)
        if not self._depth or latent is None:
            yield
            return
        stop = stopwatch(latent.device)
        try:
            yield
        finally:
            self._forwards.append((_shape_of(latent), stop()))

    def end(self, steps: Callable[[], Mapping[str, StepRecord]] | None) -> PictureTime | None:
        """Note that a picture has ended.

        Args:
            steps: Returns the measured steps by size, such as ``{"512x768": …}``; None when no
                graph served this picture.

        Returns:
            The picture's time; None within another picture, and for an interrupted one.
        """
        self._depth -= 1
        if self._depth:
            return None
        if self._is_interrupted:
            self.last, self._forwards, self._last_forwards = None, [], []
            return None
        seconds = time.perf_counter() - self._began
        without_s, other_pace = None, False
        if steps is not None and self._forwards:
            saved_s, other_pace = _saved_s(self._forwards, steps())
            without_s = None if saved_s is None else max(0.0, seconds + saved_s)
        sizes = frozenset(str(shape) for shape, _ in self._forwards)
        self._last_forwards, self._forwards = self._forwards, []
        self.last = PictureTime(seconds, without_s, sizes, other_pace)
        return self.last


def _saved_s(
    forwards: list[tuple[BatchShape | None, Timing]], steps: Mapping[str, StepRecord]
) -> tuple[float | None, bool]:
    """Sum up eager's time less the measured one.

    A machine that is busier or idler than it was when the steps were measured is another machine.
    Then the picture's own steps take another time than the measured ones.

    Returns:
        (seconds, whether the pace was another). Seconds are None without comparable measurements.
    """
    saved_s = 0.0
    for size, taken in _by_size(forwards).items():
        step = steps.get(size)
        if step is None:
            return None, False
        usual_s = step.compiled_ms / 1000
        # DeepCache makes some steps shorter, and comparisons make the first ones longer.
        if statistics.median(taken) > _SLOWEST * usual_s or max(taken) < _FASTEST * usual_s:
            return None, True
        # Eager steps would have gone at the same pace: so the header's figure and this one agree.
        pace = statistics.median(s for s in taken if s >= _FASTEST * usual_s) / usual_s
        saved_s += len(taken) * step.eager_ms / 1000 * min(pace, _SLOWEST) - sum(taken)
    return saved_s, False


def _by_size(forwards: list[tuple[BatchShape | None, Timing]]) -> dict[str, list[float]]:
    by_size: dict[str, list[float]] = {}
    for shape, seconds in forwards:
        by_size.setdefault(str(shape), []).append(seconds())
    return by_size


def _shape_of(latent: torch.Tensor) -> BatchShape | None:
    """The size whose step under classifier-free guidance has this latent; None without one."""
    if latent.ndim != 4 or latent.shape[0] % 2:
        return None
    batch, _, height, width = latent.shape
    return BatchShape(width * CELL_PX, height * CELL_PX, batch // 2)

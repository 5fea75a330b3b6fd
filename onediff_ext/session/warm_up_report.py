"""The progress and the results of a warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from onediff_ext.core.shapes import BatchShape
from onediff_ext.core.words import counted

STAGES = ("kinds", "captures", "measuring")


@dataclass(frozen=True)
class WarmUpProgress:
    """The progress of a warm-up.

    Args:
        stage: One of `STAGES`.
        done, needed: Kinds in the first stage, sizes in the others.
        label: The present kinds or size, or the last ones.
        seconds_left: Until the end of this stage; None when unknown.
    """

    stage: str
    done: int
    needed: int
    label: str
    seconds_left: float | None


@dataclass(frozen=True)
class SizeFigures:
    """The measurements at one size.

    Args:
        shape: Size in pixels and pictures at once. CFG doubles the UNet's batch.
        first_s: Seconds of the first step at this size.
        eager_ms, compiled_ms: Milliseconds of one step, the shortest of several.
    """

    shape: BatchShape
    first_s: float
    eager_ms: float
    compiled_ms: float

    @property
    def speedup(self) -> float:
        """Eager time over compiled time."""
        return self.eager_ms / self.compiled_ms

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "size": str(self.shape),
            "first_s": self.first_s,
            "eager_ms": self.eager_ms,
            "compiled_ms": self.compiled_ms,
            "speedup": self.speedup,
        }


@dataclass
class WarmUpReport:
    """The results of a warm-up.

    Args:
        sizes: Measurements in the order of the sizes; incomplete when the warm-up ended early.
        built: Kinds whose graph this warm-up has built.
        loaded: Kinds whose graph was there already: stored, or in use before.
        built_before: Kinds whose graph this process had built before.
        eager: Kinds that stay eager.
        cancelled: Whether somebody ended it early.
        gave_way: Whether it ended early since somebody wanted a picture.
        seconds: Of the whole warm-up.
    """

    sizes: list[SizeFigures] = field(default_factory=list)
    built: int = 0
    loaded: int = 0
    built_before: int = 0
    eager: int = 0
    cancelled: bool = False
    gave_way: bool = False
    seconds: float = 0.0

    def followed_by(self, later: WarmUpReport) -> WarmUpReport:
        """Combine this pass with a later one over the sizes that were left.

        What was built between the two counts too: builds go on while waiting pictures are drawn.
        """
        built = later.built_before + later.built - self.built_before
        return replace(
            later,
            sizes=self.sizes + later.sizes,
            built=built,
            built_before=self.built_before,
            loaded=max(0, later.built + later.loaded - built),
            eager=max(self.eager, later.eager),
            seconds=self.seconds + later.seconds,
        )

    @property
    def speedup(self) -> float | None:
        """The geometric mean over all sizes; None when nothing was measured."""
        return statistics.geometric_mean(s.speedup for s in self.sizes) if self.sizes else None

    def line(self) -> str:
        """One line for people."""
        gain = "" if self.speedup is None else f", {self.speedup:.1f}x measured"
        stays = f", {self.eager} stay eager" if self.eager else ""
        ended = "cancelled: " if self.cancelled else "not finished: " if self.gave_way else ""
        done = f"{counted(self.built, 'graph')} built, {self.loaded} loaded"
        return (
            f"{ended}{counted(len(self.sizes), 'size')}, {done}"
            f"{stays} in {self.seconds:.1f} s{gain}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "sizes": [figures.as_json() for figures in self.sizes],
            "built": self.built,
            "loaded": self.loaded,
            "eager": self.eager,
            "cancelled": self.cancelled,
            "seconds": self.seconds,
            "speedup": self.speedup,
            "line": self.line(),
        }


WarmUpListener = Callable[[WarmUpProgress], None]

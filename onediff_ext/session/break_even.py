"""Whether graphs pay: what their builds cost against what they save."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from onediff_ext.store import BuildHistory, StepRecord

STEPS_OF_A_PICTURE = 20


def speedup_of(steps: Sequence[StepRecord]) -> float | None:
    """How many times faster than eager the measured steps are, in the geometric mean."""
    if not steps:
        return None
    return statistics.geometric_mean(step.eager_ms / step.compiled_ms for step in steps)


def break_even(build_seconds: float, steps: Sequence[StepRecord]) -> int | None:
    """Pictures of 20 steps after which builds have saved what they took.

    Args:
        build_seconds: What the builds took, with as many workers as there were.
        steps: Measured ones; each counts the same.

    Returns:
        None when nothing was measured or nothing is saved.
    """
    if not steps:
        return None
    saved_ms = statistics.fmean(step.eager_ms - step.compiled_ms for step in steps)
    if saved_ms <= 0:
        return None
    return math.ceil(1000 * build_seconds / (saved_ms * STEPS_OF_A_PICTURE))


def pictures_until_it_pays(
    history: BuildHistory, labels: Sequence[str], worker_count: int, steps: Sequence[StepRecord]
) -> int | None:
    """The same for kinds by their labels; None also when a build time is not known."""
    if not steps or not labels:
        return None
    known = [s for s in history.build_seconds(steps[-1].machine, labels) if s is not None]
    if len(known) < len(labels):
        return None
    return break_even(sum(known) / worker_count, steps)

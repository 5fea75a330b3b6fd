"""Break-even: how many pictures it takes until graphs have saved the time of their builds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from onediff_ext.store import BuildHistory, StepRecord

STEPS_OF_A_PICTURE = 20


def speedup_of(steps: Sequence[StepRecord]) -> float | None:
    """Return the geometric mean of eager time over compiled time; None without steps.

    Args:
        steps: Measured steps; each counts the same.
    """
    if not steps:
        return None
    return statistics.geometric_mean(step.speedup for step in steps)


def break_even(build_seconds: float, steps: Sequence[StepRecord]) -> int | None:
    """Return the number of pictures of 20 steps after which builds have saved their own time.

    Args:
        build_seconds: Wall time of the builds.
        steps: Measured steps; each counts the same.

    Returns:
        Pictures; None when nothing was measured or nothing is saved.
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
    """The same as `break_even`, with build times from the history.

    Args:
        history: Build times of the machine.
        labels: Labels of the built kinds.
        worker_count: Workers that built at the same time.
        steps: Measured steps of the machine and one backend.

    Returns:
        Pictures; None also when a build time is unknown.
    """
    if not steps or not labels:
        return None
    last = steps[-1]
    known = [s for s in history.build_seconds(last.machine, last.backend, labels) if s is not None]
    if len(known) < len(labels):
        return None
    return break_even(sum(known) / worker_count, steps)

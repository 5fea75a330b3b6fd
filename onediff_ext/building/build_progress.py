"""How far a build has come, and how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onediff_ext.building.build_jobs import Job


@dataclass(frozen=True)
class BuildProgress:
    """The progress of one build.

    Args:
        done: Finished kinds, including failed ones.
        needed: All kinds of this build.
        label: The kind that was finished last.
        seconds_left: Estimated from the history of this machine, else from the builds so far.
    """

    done: int
    needed: int
    label: str
    seconds_left: float


ProgressListener = Callable[[BuildProgress], None]


def remaining_seconds(
    jobs: Sequence[Job],
    running: Sequence[Job],
    expected_s: Sequence[float | None],
    finished_s: Sequence[float],
) -> float | None:
    """Estimate the remaining work if one job runs after the other.

    Args:
        jobs: All unfinished jobs.
        running: The jobs among them that a worker has begun.
        expected_s: Seconds of each job from this machine's history; None where it has no figure.
        finished_s: Seconds of the builds so far. Their mean replaces a missing figure.

    Returns:
        Seconds, or None when there is no figure at all for some job.
    """
    mean_s = sum(finished_s) / len(finished_s) if finished_s else None
    now, total_s = time.monotonic(), 0.0
    for job, known_s in zip(jobs, expected_s, strict=True):
        seconds = mean_s if known_s is None else known_s
        if seconds is None:
            return None
        if job in running:
            seconds = max(seconds - (now - job.started_at), 0.1 * seconds)
        total_s += seconds
    return total_s

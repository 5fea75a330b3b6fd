"""How far a build has come, and how long it still takes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onediff_ext.building.build_jobs import Job

_FAR_LONGER, _ALLOWANCE_S = 2.0, 5.0
# Of a first graph with Inductor: 36 s of processor time with torch 2.13 and GCC 12, most of it
# for files of the compiler (docs/background.md). Other devices were not measured.
_FIRST_GRAPH_S = {("inductor", "cpu"): 36.0}


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


def first_graph_seconds(backend: str, device_type: str, spent_s: float) -> float | None:
    """Estimate when a machine without any figures has its first graph, from other machines.

    Args:
        backend, device_type: What builds the graph, and for what.
        spent_s: How long this build has gone on.

    Returns:
        Seconds from the begin, on a machine that does nothing else; None without a figure, or when
        that time is over: this machine is busier, or slower.
    """
    seconds = _FIRST_GRAPH_S.get((backend, device_type))
    return None if seconds is None or spent_s > seconds else seconds


def remaining_seconds(
    running: Sequence[Job],
    expected_s: Sequence[float | None],
    finished_s: Sequence[float],
    pace: float = 1.0,
) -> float | None:
    """Estimate the remaining time if one job runs after the other.

    Args:
        running: The jobs that a worker has begun.
        expected_s: Seconds from this machine's history of each of these jobs, then of each job that
            no worker has begun; None where it has no figure.
        finished_s: Seconds of the builds so far. Their mean replaces a missing figure.
        pace: Share of full speed that pictures leave to the workers.

    Returns:
        Seconds; None when there is no figure for some job, or when a job takes far longer than
        its figure: this machine is busier than it was, and nobody knows how long it stays so.
    """
    mean_s = sum(finished_s) / len(finished_s) if finished_s else None
    now, total_s = time.monotonic(), 0.0
    for job, known_s in itertools.zip_longest(running, expected_s):
        seconds = mean_s if known_s is None else known_s
        if seconds is None:
            return None
        if job is not None:
            spent_s = pace * (now - job.started_at)
            if spent_s > _FAR_LONGER * seconds + _ALLOWANCE_S:
                return None
            seconds = max(seconds - spent_s, 0.1 * seconds)
        total_s += seconds
    return total_s / pace

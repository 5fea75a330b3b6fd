"""How long a build still takes, as far as anybody knows."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.building.build_jobs import Job, JobQueues
from onediff_ext.building.build_progress import first_graph_seconds, remaining_seconds


def job(begun_s_ago: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(started_at=time.monotonic() - begun_s_ago)


def test_waiting_and_running_jobs_add_up() -> None:
    left = remaining_seconds([job(4.0)], [10.0, 20.0], [])
    assert left == pytest.approx(26.0, abs=0.5)


def test_a_missing_figure_is_the_mean_so_far_or_nothing() -> None:
    assert remaining_seconds([], [None], [4.0, 8.0]) == pytest.approx(6.0)
    assert remaining_seconds([], [None], []) is None


def test_a_job_that_takes_far_longer_makes_the_estimate_unknown() -> None:
    """The header said "18 s left" for minutes on a machine whose cores were all busy."""
    late, a_little_late = job(60.0), job(12.0)
    assert remaining_seconds([late], [10.0, 10.0], []) is None
    left = remaining_seconds([a_little_late], [10.0], [])
    assert left == pytest.approx(1.0)


def test_a_machine_without_figures_has_another_ones_for_its_first_graph() -> None:
    """The header said "building 0 of 9 graphs" for minutes, and nothing else."""
    assert first_graph_seconds("inductor", "cpu", spent_s=6.0) == 36.0
    assert first_graph_seconds("inductor", "cpu", spent_s=40.0) is None  # it is busier or slower
    assert first_graph_seconds("inductor", "cuda", spent_s=0.0) is None
    assert first_graph_seconds("oneflow", "cpu", spent_s=0.0) is None


def test_kinds_count_from_the_moment_they_are_known() -> None:
    """The estimate was 0 s while kinds waited to be claimed."""
    known: list[Any] = [SimpleNamespace(name=name) for name in "abcd"]
    jobs = JobQueues(known[:2])
    jobs.elsewhere.append(known[2])
    jobs.start_export(Job(known[3], ExitStack()))
    assert {kind.name for kind in jobs.kinds_before_workers} == set("abcd")
    jobs.take_exported(known[3])
    jobs.new.clear()
    assert jobs.kinds_before_workers == [known[2]]

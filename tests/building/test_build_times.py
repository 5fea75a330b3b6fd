"""The pace of workers, as their builds show it."""

from __future__ import annotations

import time

import pytest

from onediff_ext.building.build_times import BuildTimes


def test_the_pace_is_what_builds_have_shown() -> None:
    times = BuildTimes()
    assert times.pace(1.0) == 1.0
    assert times.pace(0.2) == 0.2  # none has ended
    times.add(5.0, time.monotonic() - 10)
    assert times.pace(0.2) == pytest.approx(0.5, abs=0.01)
    assert times.pace(0.7) == 0.7
    assert times.pace(1.0) == 1.0
    assert times.own_s == [5.0]


def test_a_clock_that_says_less_than_the_worker_is_full_speed() -> None:
    times = BuildTimes()
    times.add(5.0, time.monotonic())
    assert times.pace(0.2) == 1.0
    assert 0 <= times.spent_s < 5


def test_the_figure_for_the_whole_run_stays_while_it_is_about_right() -> None:
    times = BuildTimes()
    assert times.whole_s(None) is None
    assert times.whole_s(0.0) is None  # all come from the store
    assert times.whole_s(100.0) == pytest.approx(100.0, abs=1)
    first_s = times.whole_s(90.0)
    assert first_s == times.whole_s(120.0) == times.whole_s(None)
    assert times.whole_s(300.0) == pytest.approx(300.0, abs=1)  # the machine has become busier
    assert times.whole_s(50.0) == pytest.approx(50.0, abs=1)

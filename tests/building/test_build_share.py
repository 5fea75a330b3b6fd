"""Builds get a share of a CPU that draws without a pause, and all idle cores beside a GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from onediff_ext.building.build_share import FIRST_SHARE, LARGEST_SHARE, BuildShare
from onediff_ext.building.foreground_scheduler import SHARE_WHILE_DRAWING, ForegroundScheduler
from onediff_ext.core.priority import nice_for_share

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Machine:
    """A foreground whose time is a test's."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.foreground = ForegroundScheduler(self.clock)
        self.share = BuildShare(self.foreground)

    def turns_in_one_picture(self, device: torch.device, *, cost_s: float = 0.05) -> int:
        """Draw 100 s; return how many turns some work got, which wants one all the time."""
        refused = threading.Event()
        refused.set()  # not now is never
        taken = 0
        with self.foreground.picture():
            for _ in range(1000):
                self.clock.seconds += 0.1
                share = self.share.of_turns(device)
                with self.foreground.turn(cost_s, stop=refused, share=share) as granted:
                    taken += granted
                    self.clock.seconds += cost_s * granted
        return taken


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_busy_cpu_leaves_a_tenth_from_the_start_and_more_with_each_picture(
    machine: Machine,
) -> None:
    shares = []
    for _ in range(6):
        with machine.foreground.picture():
            shares.append(machine.share.of_processors(CPU))
            assert machine.share.pace(CPU) == shares[-1]
            machine.clock.seconds += 1
    assert shares[0] > FIRST_SHARE >= 0.1  # the picture that met the kinds was the first one
    assert shares == sorted(shares)
    assert shares[1] > shares[0]
    assert shares[-1] == LARGEST_SHARE < 0.5
    machine.share.begin()
    assert machine.share.of_processors(CPU) == FIRST_SHARE


def test_builds_of_a_gpu_use_idle_cores_at_full_speed(machine: Machine) -> None:
    with machine.foreground.picture():
        assert machine.share.of_processors(GPU) == 0
        assert machine.share.of_turns(GPU) == SHARE_WHILE_DRAWING
        assert machine.share.pace(GPU) == 1


def test_nobody_draws_builds_run_at_full_speed(machine: Machine) -> None:
    with machine.foreground.picture():
        pass
    machine.clock.seconds += 1
    assert machine.share.pace(CPU) == machine.share.pace(GPU) == 1


@pytest.mark.parametrize(("device", "least"), [(CPU, 0.1), (GPU, 0.04)])
def test_turns_beside_one_endless_picture_are_the_share(
    machine: Machine, device: torch.device, least: float
) -> None:
    drawn_s = 100
    taken_s = 0.05 * machine.turns_in_one_picture(device)
    assert least * drawn_s * 0.95 < taken_s < 2 * least * drawn_s


@pytest.mark.parametrize("share", [0.1, 0.15, 0.2, 0.25, 0.5])
def test_a_nice_value_leaves_at_least_the_share(share: float) -> None:
    weight = 1.25 ** -nice_for_share(share)  # beside one of weight 1
    assert share <= weight / (1 + weight) < 1.35 * share

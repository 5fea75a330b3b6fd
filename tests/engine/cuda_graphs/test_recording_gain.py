"""Whether a size is recorded again where the weights move from picture to picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onediff_ext.engine.cuda_graphs.recording_gain import RecordingGain
from onediff_ext.engine.stopwatch import ElapsedTime
from onediff_ext.hosts.diffusers.compile import compiled_state
from tests.support.cuda_graph_steps import assert_right, captured, settle, step
from tests.support.frozen_recorder import NEVER, FrozenRecorder

STEPS = 20


class Host:
    """A host that moves a model's weights before each picture.

    Args:
        python_s, replay_s, recording_s: Seconds of a forward in Python, of a replay, and of a
            recording with its comparison.
    """

    def __init__(self, python_s: float, replay_s: float, recording_s: float) -> None:
        self.gain = RecordingGain()
        self.python, self.replay = ElapsedTime(python_s), ElapsedTime(replay_s)
        self.recording = ElapsedTime(recording_s)
        self.recorded = False
        self._weights, self._picture = Weights(), 0

    def move(self) -> None:
        """Move the weights, so that the CUDA graph is gone."""
        self._weights, self.recorded = Weights(), False

    def draw(self, steps: int = STEPS) -> int:
        """Draw a picture. Return the steps in Python until the size was recorded, or all."""
        self._picture += 1
        in_python = replays = 0
        for _ in range(steps):
            if self.recorded:
                replays += 1
                self.gain.note_replay("size", self.replay if replays == 2 else None)
                continue
            in_python += 1
            self.gain.note_python("size", self.python)
            if self.gain.still_refused_reason("size", self._picture) is None and (
                self.gain.refused_reason("size", self._picture, self._weights) is None  # type: ignore[arg-type]
            ):
                self.gain.note_recording("size", self.recording)
                self.recorded = True
        return in_python

    def draw_moved(self, steps: int = STEPS) -> int:
        """As `draw`, with weights that have moved."""
        self.move()
        return self.draw(steps)


class Weights:
    """Stands in for a snapshot: it is another one when weights have moved."""


def test_a_size_is_recorded_where_that_pays() -> None:
    host = Host(python_s=0.025, replay_s=0.012, recording_s=0.25)
    for _ in range(4):
        assert host.draw_moved() == 1


def test_a_size_is_not_recorded_where_the_gpu_takes_longer_than_python() -> None:
    host = Host(python_s=0.0375, replay_s=0.037, recording_s=0.25)
    # The first recording of a process takes longer than others, so the second one has to be seen.
    assert [host.draw_moved() for _ in range(5)] == [1, 1, STEPS, STEPS, STEPS]


def test_it_is_recorded_as_soon_as_the_weights_stay_for_long_enough() -> None:
    host = Host(python_s=0.0375, replay_s=0.037, recording_s=0.105)
    for _ in range(3):
        host.draw_moved()
    pictures = 0
    while host.draw() == STEPS:
        pictures += 1
    assert pictures == 0.105 / 0.0005 // STEPS - 1
    for _ in range(12):
        assert host.draw() == 0
    assert host.draw_moved() == 1, "the last one has lasted for long enough"
    assert host.draw_moved() == STEPS, "this one has not"


def test_more_steps_than_expected_are_recorded_once_they_would_have_paid() -> None:
    host = Host(python_s=0.040, replay_s=0.037, recording_s=0.25)
    for _ in range(3):
        host.draw_moved()
    assert host.draw_moved(steps=200) == 85
    assert host.draw_moved(steps=200) == 1


def test_python_that_has_become_slower_is_noticed() -> None:
    host = Host(python_s=0.0375, replay_s=0.037, recording_s=0.25)
    for _ in range(3):
        host.draw_moved()
    host.python = ElapsedTime(0.080)
    assert host.draw_moved() == 2
    assert host.draw_moved() == 1


def test_a_processor_that_is_busy_now_and_then_is_noticed() -> None:
    host = Host(python_s=0.0375, replay_s=0.037, recording_s=0.25)
    for _ in range(3):
        host.draw_moved()
    steps = 0
    while not host.recorded and steps < 40:
        host.python = ElapsedTime(0.0375 if steps % 4 else 0.120)
        steps += host.draw(steps=1)
    assert steps < 20


def test_one_slow_replay_does_not_count() -> None:
    host = Host(python_s=0.050, replay_s=0.012, recording_s=0.25)
    for _ in range(2):
        host.draw_moved()
    host.replay = ElapsedTime(0.060)
    for _ in range(3):
        assert host.draw_moved() == 1


def test_other_sizes_have_other_times() -> None:
    host = Host(python_s=0.0375, replay_s=0.037, recording_s=0.25)
    for _ in range(3):
        host.draw_moved()
    assert host.gain.refused_reason("other", 9, Weights()) is None  # type: ignore[arg-type]


def test_without_measurements_every_size_is_recorded() -> None:
    host = Host(python_s=0.0375, replay_s=0.037, recording_s=0.25)
    host.replay = NEVER  # type: ignore[assignment]
    for _ in range(4):
        assert host.draw_moved() == 1
    host.replay = ElapsedTime(0.037)
    host.draw_moved()
    assert host.draw_moved() == STEPS
    host.gain.forget()
    assert host.draw_moved() == 1


# ------------------------------------------------------------------ in a model


@torch.no_grad()
def move(pipe: Any) -> None:
    for weight in pipe.unet.parameters():
        weight.data = weight.data.clone()


def draw_moved(pipe: Any, steps: int = 5) -> None:
    move(pipe)
    with compiled_state(pipe).session.foreground.picture():
        for seed in range(steps):
            step(pipe, seed)


@pytest.mark.parametrize(("python_s", "recorded"), [(0.025, 6), (0.0121, 2)])
def test_weights_that_move_with_each_picture(
    pipe: Any, recorder: FrozenRecorder, python_s: float, recorded: int
) -> None:
    recorder.python, recorder.replay = ElapsedTime(python_s), ElapsedTime(0.012)
    recorder.recording = ElapsedTime(0.040)
    settle(pipe)
    for _ in range(5):
        draw_moved(pipe)
        assert_right(pipe)
    assert recorder.recorded == recorded
    assert ("before the weights move" in captured(pipe).reason) == (recorded == 2)

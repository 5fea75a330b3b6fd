"""Pictures that overflow: no replay is paid for where eager gives NaN to compare it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onediff_ext.engine.cuda_graphs.replay_checks import UNDECIDED
from onediff_ext.session.session import Session
from tests.support.cuda_graph_steps import assert_right, captured, settle, step
from tests.support.frozen_recorder import FrozenRecorder


def overflow(unet: Any) -> None:
    """Another model as far as a CUDA graph can tell, as a LoRA that is merged makes it."""
    weight = torch.full_like(unet.conv_out.weight, float("nan"))
    unet.conv_out.weight = nn.Parameter(weight, requires_grad=False)


def replays_of_forwards(recorder: FrozenRecorder) -> int:
    return sum(made.replays for made in recorder.forwards)


def test_a_picture_of_nan_is_compared_once(
    pipe: Any, session: Session, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    overflow(pipe.unet)
    for _ in range(2):
        replays = replays_of_forwards(recorder)
        with session.picture():
            for seed in range(6):
                assert step(pipe, seed).isnan().all()
        # The one that shows that the model is another, and one to compare.
        assert replays_of_forwards(recorder) <= replays + 2
        assert captured(pipe).reason == UNDECIDED


def test_the_next_picture_is_compared_again(
    pipe: Any, session: Session, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    overflow(pipe.unet)
    with session.picture():
        for seed in range(4):
            step(pipe, seed)
    recorded = recorder.recorded
    with torch.no_grad():  # numbers in the same place: the CUDA graph is the same
        pipe.unet.conv_out.weight.copy_(torch.randn_like(pipe.unet.conv_out.weight))
    with session.picture():
        for seed in range(4):
            step(pipe, seed)
        assert captured(pipe).reason == ""
        assert captured(pipe).replayed
    assert recorder.recorded == recorded
    assert_right(pipe)


def test_a_cuda_graph_in_use_goes_on(pipe: Any, session: Session, recorder: FrozenRecorder) -> None:
    """It has passed all comparisons, so NaN is a result like another."""
    settle(pipe)
    with torch.no_grad():
        pipe.unet.conv_out.weight.fill_(float("nan"))
    with session.picture():
        for seed in range(4):
            assert step(pipe, seed).isnan().all()
            assert captured(pipe).replayed
    assert recorder.recorded == 1

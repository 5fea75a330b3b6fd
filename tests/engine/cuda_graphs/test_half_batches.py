"""A forward that is run on the halves of its batch, and which forwards may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

from onediff_ext.engine.cuda_graphs.half_batches import run_in_halves
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.session.session import Session
from tests.support.cuda_graph_steps import step
from tests.support.ldm_stand_in import live_in
from tests.support.models import sd15


class Hungry(nn.Module):
    """Has memory for one image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:
            raise torch.OutOfMemoryError("no room")
        return x


class FirstImage(AttnProcessor2_0):
    """All images attend to the first one, as diffusers' processors of frames of a video do."""


live_in(Hungry, "diffusers.made_for_a_test")
live_in(FirstImage, "diffusers.pipelines.made_for_a_test")


@pytest.mark.parametrize("others", ["none", "images that depend on each other", "a hook"])
def test_only_known_forwards_of_independent_images_are_halved(
    session: Session, others: str
) -> None:
    pipe = sd15(seed=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    pipe.unet.conv_act = nn.Sequential(pipe.unet.conv_act, Hungry())
    calls: list[int] = []
    if others == "a hook":
        pipe.unet.conv_in.register_forward_hook(lambda module, args, x: calls.append(1))
    elif others != "none":
        for module in pipe.unet.modules():
            if isinstance(vars(module).get("processor"), AttnProcessor2_0):
                module.processor = FirstImage()
    try:
        if others == "none":
            assert step(pipe, 7).shape[0] == 2
        else:
            with pytest.raises(torch.OutOfMemoryError):
                step(pipe, 7)
    finally:
        undo_compile(pipe)
    assert len(calls) == (1 if others == "a hook" else 0)  # it may count them


def test_lists_of_the_call_are_emptied_as_by_the_whole_batch() -> None:
    """diffusers' UNet pops a T2I-Adapter's residuals from the caller's list."""

    def forward(x: torch.Tensor, residuals: list[torch.Tensor], notes: dict[str, Any]) -> Any:
        notes["images"] = True
        while len(residuals) > 1:
            x = x + residuals.pop(0)
        return x

    def call() -> tuple[torch.Tensor, list[torch.Tensor], dict[str, Any]]:
        return torch.ones(4, 2, 8, 8), [torch.full((4, 2, 8, 8), float(n)) for n in range(3)], {}

    whole, halves = call(), call()
    expected = forward(*whole)
    found = run_in_halves(forward, halves, {}, torch.OutOfMemoryError("none"))
    assert torch.equal(found, expected)
    assert len(halves[1]) == len(whole[1]) == 1
    assert torch.equal(halves[1][0], whole[1][0])
    assert halves[2] == whole[2]

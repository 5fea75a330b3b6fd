"""What a forward takes out of the lists of its call, a replay takes out too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_ext.engine.cuda_graphs.argument_containers import ArgumentContainers
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.oom_fallback import OomFallback, Retry
from onediff_ext.session.session import Session
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import unet_inputs
from tests.support.settled_twins import Twins


@pytest.fixture
def session(make_session: Callable[..., Session]) -> Session:
    return make_session(spot_checks=False)


@torch.no_grad()
def test_one_list_of_residuals_for_all_steps(session: Session) -> None:
    """The UNet takes those of a T2I-Adapter out of the caller's list at the first step."""
    twins = Twins(session)
    config = twins.unets[0].config
    for picture in range(5):
        lists = [
            [
                torch.full((2, width, 16 >> i, 16 >> i), 0.3 + picture)
                for i, width in enumerate(config.block_out_channels)
            ]
            for _ in twins.unets
        ]
        for step in range(3):
            found, expected = (
                unet(
                    **unet_inputs(unet, height_latent=16, width_latent=16, seed=step),
                    down_intrablock_additional_residuals=residuals,
                ).sample
                for unet, residuals in zip(twins.unets, lists, strict=True)
            )
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
            assert len(lists[0]) == len(lists[1])
    assert twins.captured.replayed


def test_a_second_try_gets_the_whole_list() -> None:
    lengths = []

    def forward(residuals: list[int]) -> int:
        lengths.append(len(residuals))
        taken = residuals.pop(0)
        if len(lengths) == 1:
            raise torch.OutOfMemoryError
        return taken

    cache = CudaGraphCache(FrozenRecorder(), limit=1)
    residuals = [7, 8]
    assert OomFallback(forward, cache, lambda args, kwargs: Retry.WHOLE)(residuals) == 7
    assert (lengths, residuals) == ([2, 2], [8])


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda a: None, ["x", "y", "z"]),
        (lambda a: a["list"].pop(0), ["y", "z"]),
        (lambda a: a["list"].pop(), ["x", "y"]),
        (lambda a: a["list"].clear(), []),
        (lambda a: a["list"].append("w"), ["x", "y", "z", "w"]),
        (lambda a: a["list"].reverse(), ["z", "y", "x"]),
        (lambda a: a["list"].append(torch.zeros(1)), None),
    ],
)
def test_what_is_taken_out_is_taken_out_of_the_next_call(
    change: Callable[[Any], Any], left: list[str] | None
) -> None:
    def call() -> dict[str, Any]:
        return {"list": ["x", "y", "z"], "more": {"deep": [("a", {"b": 1})]}}

    first, second = call(), call()
    containers = ArgumentContainers((), {"arguments": first})
    change(first)
    changes = containers.changes()
    if left is None:
        assert changes is None
        return
    assert changes is not None
    ArgumentContainers((), {"arguments": second}).apply(changes)
    assert second == {**call(), "list": left} == first
    containers.restore()
    assert first == call()


def test_what_is_noted_in_a_dictionary_is_noted_in_that_of_the_next_call() -> None:
    """Forge's UNet writes sizes and the numbers of blocks into ``transformer_options``."""

    def call() -> dict[str, Any]:
        return {"cond_or_uncond": [0, 1], "block": ("input", 0), "patches": {}}

    first, second = call(), call()
    containers = ArgumentContainers((first,), {})
    first.update(block=("output", 2), original_shape=[2, 4, 16, 24], patches_of=first["patches"])
    changes = containers.changes()
    assert changes is not None
    ArgumentContainers((second,), {}).apply(changes)
    assert second == first
    assert second["original_shape"] is not first["original_shape"]
    first["mask"] = torch.ones(2)
    assert containers.changes() is None

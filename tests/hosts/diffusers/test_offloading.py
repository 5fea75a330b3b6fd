"""Pipelines whose models are moved to the GPU and back for each picture."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.hosts.diffusers.compile import compile_pipe, one_picture, undo_compile
from onediff_ext.hosts.diffusers.offloading import offloaded_models
from onediff_ext.session.session import Session
from tests.support.draw import relative_error
from tests.support.session_fixtures import (  # noqa: F401
    SmallUNet,
    exports,
    instant_workers,
    open_session,
)

accelerate = pytest.importorskip("accelerate")
TIMEOUT_S = 60


def offload(model: nn.Module) -> Any:
    """What ``enable_model_cpu_offload`` does with each model; here the GPU is the CPU."""
    return accelerate.cpu_offload_with_hook(model, torch.device("cpu"))[1]


def draw(small: SmallUNet) -> torch.Tensor:
    with one_picture(small.pipe):
        return small()


def test_only_models_that_are_moved_as_a_whole_are_found() -> None:
    small = SmallUNet()
    small.pipe.components = {"unet": small.unet, "scheduler": object(), "vae": nn.Linear(1, 1)}
    assert offloaded_models(small.pipe) == []
    offload(small.unet)
    assert offloaded_models(small.pipe) == [small.unet]
    accelerate.hooks.add_hook_to_module(small.unet, accelerate.hooks.ModelHook(), append=True)
    assert offloaded_models(small.pipe) == [small.unet]  # among several hooks
    assert offloaded_models(object()) == []


def test_they_are_moved_through_pinned_memory_and_drawn_as_before(
    open_session: Callable[..., Session],  # noqa: F811
    instant_workers: None,  # noqa: F811
) -> None:
    expected = SmallUNet()()
    small, session = SmallUNet(), open_session()
    small.pipe.components = {"unet": small.unet}
    compile_pipe(small.pipe, session=session)
    draw(small)
    assert "to" not in vars(small.unet)
    hook = offload(small.unet)
    for _ in range(3):
        assert relative_error(draw(small), expected) < 1e-4
        hook.offload()
        assert session.wait_for_builds(TIMEOUT_S)
    assert "to" in vars(small.unet)
    assert session.status().running == "compiled"
    undo_compile(small.pipe)
    assert "to" not in vars(small.unet)
    assert torch.equal(small(), expected)


def test_somebody_elses_move_stays(open_session: Callable[..., Session]) -> None:  # noqa: F811
    small = SmallUNet()
    small.pipe.components = {"unet": small.unet}
    offload(small.unet)
    vars(small.unet)["to"] = theirs = lambda *_, **__: small.unet
    compile_pipe(small.pipe, session=open_session())
    draw(small)
    assert vars(small.unet)["to"] is theirs


def test_a_model_that_was_replaced_can_go(
    open_session: Callable[..., Session],  # noqa: F811
    instant_workers: None,  # noqa: F811
) -> None:
    small = SmallUNet()
    small.pipe.components = {"unet": small.unet, "text_encoder": nn.Linear(1, 1)}
    compile_pipe(small.pipe, session=open_session())
    gone = []
    for _ in range(3):
        small.pipe.components["text_encoder"] = model = nn.Linear(1, 1)
        offload(model)
        draw(small)
        assert "to" in vars(model)
        gone.append(weakref.ref(model))
    small.pipe.components["text_encoder"] = model = nn.Linear(1, 1)
    draw(small)
    gc.collect()
    assert [model() for model in gone] == [None] * 3
    undo_compile(small.pipe)

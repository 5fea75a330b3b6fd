"""Callbacks that compile a pipeline, undo that or switch DeepCache while a picture is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.hosts.diffusers.deepcache import disable_deepcache, enable_deepcache
from onediff_ext.hosts.diffusers.guidance_steps import guidance_steps_for
from onediff_ext.session.session import Session
from tests.hosts.diffusers.gate_draws import GATE, INTERVAL, at
from tests.hosts.diffusers.test_chosen_guidance_steps import are_alike, attributes, draw
from tests.support import models
from tests.support.frozen_recorder import FrozenRecorder

NewSession = Callable[..., Session]


def guided(pipe: Any, text: str, steps: int = 6, **given: Any) -> torch.Tensor:
    with guidance_steps_for(pipe, GuidanceOptions.parse(text)):
        return draw(pipe, num_inference_steps=steps, **given)


@pytest.mark.parametrize("guidance", [INTERVAL, GATE])
@pytest.mark.parametrize("step", [0, 2, 3])  # before the gate, after its step, and later
def test_a_pipeline_that_is_compiled_within_a_picture_draws_it_on(
    guidance: str, step: int, make_session: NewSession
) -> None:
    """The decisions of guidance steps are in no CUDA graph."""
    pipe = models.sd15()
    expected = guided(pipe, guidance)
    session = make_session(spot_checks=False)

    def compile_it(*_: Any) -> None:
        session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
        compile_pipe(pipe, session=session, ignores=["vae"])

    compile_it()
    for _ in range(3):
        guided(pipe, guidance)
    assert are_alike(guided(pipe, guidance, **at(step, compile_it)), expected)
    assert are_alike(guided(pipe, guidance), expected)
    undo_compile(pipe)


@pytest.mark.parametrize("guidance", [INTERVAL, GATE])
@pytest.mark.parametrize("step", [0, 2, 3])
def test_a_pipeline_that_is_undone_within_a_picture_draws_it_on(
    guidance: str, step: int, make_session: NewSession
) -> None:
    pipe = models.sd15()
    expected, names = guided(pipe, guidance), attributes(pipe)
    compile_pipe(pipe, session=make_session(), ignores=["vae"])
    guided(pipe, guidance)
    found = guided(pipe, guidance, **at(step, lambda *_: undo_compile(pipe)))
    assert are_alike(found, expected)
    assert attributes(pipe) == names
    assert torch.equal(guided(pipe, guidance), expected)


@pytest.mark.parametrize("guidance", [INTERVAL, GATE])
@pytest.mark.parametrize("is_on", [False, True])
def test_deepcache_that_is_switched_within_a_picture_is_switched(
    guidance: str, is_on: bool
) -> None:
    pipe, twin, steps = models.sd15(), models.sd15(), 20  # in few it reuses nothing
    guided(pipe, guidance, steps)
    names = attributes(pipe)
    enable_deepcache(twin if is_on else pipe, "2")
    expected = guided(twin, guidance, steps)
    guided(pipe, guidance, steps)
    guided(
        pipe, guidance, steps, **at(3, lambda *_: enable_deepcache(pipe, "2" if is_on else "off"))
    )
    assert torch.equal(guided(pipe, guidance, steps), expected)
    guided(pipe, guidance, steps, **at(3, lambda *_: disable_deepcache(pipe)))
    assert attributes(pipe) == names
    disable_deepcache(twin)
    assert torch.equal(guided(pipe, guidance, steps), guided(twin, guidance, steps))

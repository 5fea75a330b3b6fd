"""DeepCache among hooks, wrappers, threads and pipelines that share one UNet."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers import StableDiffusionControlNetPipeline, StableDiffusionPipeline

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.hosts.diffusers.deepcache import (
    deepcache_for,
    deepcache_state,
    disable_deepcache,
    enable_deepcache,
)
from tests.support import models
from tests.support.deepcache_draws import counts, draw
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder


def hook_again(pipe: Any) -> None:
    """As pipelines with `enable_model_cpu_offload` do after each picture."""
    remove_hook_from_module(pipe.unet)
    cpu_offload_with_hook(pipe.unet, torch.device("cpu"))


def wrap(pipe: Any) -> None:
    """As another extension does, which counts calls."""
    own = pipe.unet.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    pipe.unet.forward = forward


def sharing(pipe: Any, cls: Any = StableDiffusionPipeline, **more: Any) -> Any:
    """Another pipeline with the same models and a scheduler of its own."""
    parts = {**pipe.components, **more}
    parts["scheduler"] = type(pipe.scheduler).from_config(pipe.scheduler.config)
    return models.quiet(cls(**parts, requires_safety_checker=False))


@pytest.mark.parametrize("around", [hook_again, wrap])
def test_it_ends_although_something_stands_around_it(around: Any) -> None:
    plain, cached = draw(models.sd15()), draw(enable_deepcache(models.sd15(), 3))
    pipe = enable_deepcache(models.sd15(), 3)
    around(pipe)
    assert torch.equal(draw(pipe), cached)
    with deepcache_for(pipe, DeepCacheOptions(1)):
        assert torch.equal(draw(pipe), plain)
    disable_deepcache(pipe)
    assert torch.equal(draw(pipe), plain)
    assert deepcache_state(pipe) is None
    enable_deepcache(pipe, 3)
    assert torch.equal(draw(pipe), cached)
    disable_deepcache(pipe)
    assert torch.equal(draw(pipe), plain)


@pytest.mark.parametrize("first", ["hook", "deepcache"])
def test_a_hook_that_comes_again_after_each_picture_leaves_it(first: str) -> None:
    cached = draw(enable_deepcache(models.sd15(), 3))
    pipe = models.sd15()
    before = set(vars(pipe.unet))
    if first == "hook":
        hook_again(pipe)
    enable_deepcache(pipe, 3)
    for _ in range(3):
        hook_again(pipe)
        assert torch.equal(draw(pipe), cached)
    disable_deepcache(pipe)
    remove_hook_from_module(pipe.unet)
    assert set(vars(pipe.unet)) - before <= {"forward"}
    assert pipe.unet.forward.__func__ is type(pipe.unet).forward
    assert torch.equal(draw(pipe), draw(models.sd15()))


@pytest.fixture
def session(make_session: Any) -> Iterator[Any]:
    session = make_session(build="never")
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    yield session
    session.close()


@pytest.mark.parametrize("around", [hook_again, wrap])
def test_cuda_graphs_tell_full_and_shallow_calls_apart_under_it(around: Any, session: Any) -> None:
    """The CUDA graph of a full call, launched for a shallow one, would write the feature."""
    reference, pipe = enable_deepcache(models.sd15(), 3), models.sd15()
    compile_pipe(pipe, session=session, ignores=["vae"])
    around(pipe)
    enable_deepcache(pipe, 3)
    for height in (72, 64, 72):
        error = relative_error(draw(pipe, height=height), draw(reference, height=height))
        assert error < 1e-5
    assert len(session.cuda_graphs) == 4
    disable_deepcache(pipe)
    undo_compile(pipe)


def test_threads_with_one_unet_take_turns() -> None:
    """A call exchanges modules of the UNet, which another one must not see."""
    one = models.sd15()
    other = sharing(one)
    plain = {side: draw(one, height=side) for side in (72, 64)}
    enable_deepcache(one, 3)
    cached = {side: draw(one, height=side) for side in (72, 64)}
    found: dict[int, list[torch.Tensor]] = {72: [], 64: []}

    def draw_some(pipe: Any, side: int) -> None:
        found[side] += [draw(pipe, height=side) for _ in range(3)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [
            threading.Thread(target=draw_some, args=args) for args in ((one, 72), (other, 64))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for side, latents in found.items():
        assert len(latents) == 3
        most = relative_error(cached[side], plain[side])
        assert max(relative_error(each, plain[side]) for each in latents) < 1.5 * most
    assert torch.equal(draw(one), cached[72])


def test_each_pipeline_has_its_scheduler_and_its_controlnets() -> None:
    control = {
        "image": torch.rand(1, 3, 72, 104, generator=torch.Generator().manual_seed(3)),
        "control_guidance_end": 0.4,
    }

    def pair() -> tuple[Any, Any]:
        base = models.sd15()
        net = models.controlnet_for(base.unet, 5)
        return base, sharing(base, StableDiffusionControlNetPipeline, controlnet=net)

    _, alone = pair()
    expected = draw(enable_deepcache(alone, 5), **control)
    base, controlled = pair()
    enable_deepcache(controlled, 5)
    enable_deepcache(base, 5)
    assert torch.equal(draw(controlled, **control), expected)
    draw(base, steps=6)
    assert counts(base) == {"plain": 6}
    assert torch.equal(draw(controlled, **control), expected), "after too few steps of the other"
    disable_deepcache(base)
    assert "maybe_free_model_hooks" not in vars(controlled)
    assert not controlled.controlnet._forward_pre_hooks


def test_a_pipeline_that_was_not_told_is_not_judged_by_anothers_last_picture() -> None:
    base = models.sd15()
    other = sharing(base)
    enable_deepcache(base, 3)
    cached = draw(base)
    draw(base, steps=6)
    assert torch.equal(draw(other), cached)
    draw(base)
    draw(other, steps=6)
    assert counts(other) == {"plain": 6}


@pytest.mark.parametrize("ignores", [("vae",), ("unet",)])
def test_a_unet_that_replaces_another_in_a_compiled_pipeline(
    ignores: tuple[str, ...], make_session: Any
) -> None:
    """It is drawn with DeepCache too; the old one is left without, but for other pipelines."""
    twin: Any = models.sd15(0)
    twin.unet = models.unet(seed=5)
    expected = draw(enable_deepcache(twin, 2))
    pipe: Any = compile_pipe(models.sd15(0), session=make_session(), ignores=ignores, deepcache=2)
    draw(pipe)
    old, pipe.unet = pipe.unet, models.unet(seed=5)
    other: Any = models.sd15(0)
    other.unet = old
    for _ in range(2):
        assert relative_error(draw(pipe), expected) < 1e-4
        assert counts(pipe)["shallow"] == counts(twin)["shallow"]
    assert deepcache_state(other) is None
    assert not [name for name, module in old.named_modules() if "forward" in vars(module)]
    enable_deepcache(other, 3)
    pipe.unet, own = old, pipe.unet
    assert counts(pipe) == {}
    draw(pipe)
    state = deepcache_state(pipe)
    assert state is not None
    assert state.options.interval == 3  # the UNet's, as with pipelines that share it
    pipe.unet = own
    draw(pipe)
    disable_deepcache(undo_compile(pipe))
    assert deepcache_state(other) is not None
    assert "maybe_free_model_hooks" not in vars(pipe)
    assert not [name for name, module in own.named_modules() if "forward" in vars(module)]


def test_an_eager_pipeline_whose_unet_was_replaced_ends_it_there_too() -> None:
    pipe: Any = enable_deepcache(models.sd15(0), 2)
    old, pipe.unet = pipe.unet, models.unet(seed=5)
    disable_deepcache(pipe)
    assert "forward" not in vars(old)
    assert "maybe_free_model_hooks" not in vars(pipe)

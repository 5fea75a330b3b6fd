"""Layers that somebody exchanges, and dtypes that alternate, while CUDA graphs hold a feature."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.deepcache.deepcache_forward import DeepCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.hosts.diffusers.deepcache import disable_deepcache, enable_deepcache
from onediff_ext.hosts.unet_adapters import adapter_for
from tests.support import models
from tests.support.deepcache_draws import counts, draw
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.ldm_models import LDM_UNETS


def exchange(unet: Any, what: str) -> None:
    other = models.sd15(seed=2).unet
    if what == "resnet":
        unet.up_blocks[-1].resnets[-1] = other.up_blocks[-1].resnets[-1]
    elif what == "middle":
        unet.mid_block = other.mid_block
    else:
        unet.up_blocks[-1] = other.up_blocks[-1]


@pytest.mark.parametrize("what", ["resnet", "block", "middle"])
def test_a_layer_exchanged_between_two_pictures(what: str) -> None:
    pipe, twin = enable_deepcache(models.sd15(), 3), models.sd15()
    draw(pipe)
    for each in (pipe, twin):
        exchange(each.unet, what)
    enable_deepcache(twin, 3)
    assert torch.equal(draw(pipe), draw(twin))
    assert counts(pipe) == counts(twin) == {"full": 4, "shallow": 8}


@pytest.mark.parametrize("again", [False, True])
def test_a_block_of_another_class_makes_plain_calls(again: bool) -> None:
    """Also where the options are chosen again, as for each batch of the command line."""

    class Louder(torch.nn.Module):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.block, self.resnets = block, block.resnets

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 1.1 * self.block(*args, **kwargs)

    pipe, twin = enable_deepcache(models.sd15(), 3), models.sd15()
    draw(pipe)
    for each in (pipe, twin):
        each.unet.up_blocks[-1] = Louder(each.unet.up_blocks[-1])
        each.unet.up_blocks[-1].has_cross_attention = True
    if again:
        enable_deepcache(pipe, 3)
    assert torch.equal(draw(pipe), draw(twin))
    assert counts(pipe) == {"plain": 12}


@torch.no_grad()
def calls(unet: Any, count: int = 6) -> torch.Tensor:
    """The sum of what some calls return, on noise."""
    noise = torch.Generator().manual_seed(1)
    total = torch.zeros(2, 4, 17, 25)
    for step in range(count):
        x = torch.randn(2, 4, 17, 25, generator=noise)
        context = torch.ones(2, 77, 24)
        total += unet(x=x, timesteps=torch.full((2,), 900.0 - 40 * step), context=context)
    return total


@pytest.mark.parametrize("host", sorted(LDM_UNETS))
def test_a_block_exchanged_while_a_feature_is_held(host: str) -> None:
    """As a CUDA graph holds it, until the first call after the exchange."""
    unet = LDM_UNETS[host]()
    twin, other = copy.deepcopy(unet), copy.deepcopy(unet.output_blocks[-1])
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.3)
    caches = []
    for each in (unet, twin):
        caches.append(DeepCache(each, adapter_for(each)))
        caches[-1].install()
        caches[-1].begin_picture(DeepCacheOptions(3))
    calls(unet)
    held = list(caches[0]._features._used.values())
    for each in (unet, twin):
        each.output_blocks[-1] = other
    caches[0].begin_picture()
    assert torch.equal(calls(unet), calls(twin))
    assert len(held) == 1


@torch.no_grad()
def autocast_latents(pipe: Any, on: bool) -> torch.Tensor:
    """Of a loop whose latents stay in float32."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 9, 13, generator=generator)
    context = torch.randn(2, 77, 64, generator=generator)
    with torch.autocast("cpu", torch.bfloat16) if on else contextlib.nullcontext():
        for timestep in torch.arange(950, 0, -80):
            noise = pipe.unet(latents, timestep, encoder_hidden_states=context).sample
            latents = latents - 0.1 * noise.float()
    return latents


def test_autocast_on_and_off_while_one_cuda_graph_is_evicted(make_session: Any) -> None:
    """A full call in Python wrote to a new tensor, and a shallow CUDA graph read the old one."""
    reference, pipe = enable_deepcache(models.sd15(), 3), models.sd15()
    session = make_session(build="never", channels_last=False)
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    compile_pipe(pipe, session=session, ignores=["vae"])
    enable_deepcache(pipe, 3)
    for on in (True, False, True):
        for _ in range(2):
            found = autocast_latents(pipe, on)
        assert relative_error(found, autocast_latents(reference, on)) < 1e-5
    autocast_latents(pipe, False)
    alive = session.cuda_graphs._alive
    full = [k for k in alive if k[1][0] == "full" and "bfloat16" in str(k[2])]
    assert len(full) == 1
    session.cuda_graphs.drop(full[0], "the test evicts it")
    expected = autocast_latents(reference, True)
    assert relative_error(autocast_latents(pipe, True), expected) < 1e-5
    disable_deepcache(pipe)
    undo_compile(pipe)
    session.close()

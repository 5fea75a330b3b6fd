"""Modules moved, replaced, copied and shared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from tests.differential.drawing import EXTRA
from tests.differential.registry import feature, operation
from tests.differential.world import World


def _convolutions(world: World) -> list[str]:
    cls = nn.Conv2d if world.is_unet else nn.Linear
    return [n for n, m in world.twin_denoiser.named_modules() if type(m) is cls]


@feature(lambda w: not w.adapters)
def layer_replaced(world: World, random: Random) -> Callable[[], None]:
    name, seed = random.choice(_convolutions(world)), random.randrange(1000)
    path, _, last = name.rpartition(".")
    before = []
    for model in world.each_denoiser():
        parent = model.get_submodule(path)
        old = getattr(parent, last)
        before.append((parent, old))
        torch.manual_seed(seed)
        new: nn.Module
        if isinstance(old, nn.Linear):
            new = nn.Linear(old.in_features, old.out_features, old.bias is not None)
        else:
            sizes = (old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding)
            new = nn.Conv2d(*sizes)
        # An offloaded layer's own weight has no contents.
        setattr(parent, last, new.to(world.device, old.weight.dtype).requires_grad_(False))

    def off() -> None:
        for parent, old in before:
            setattr(parent, last, old.to(world.dtype))

    return off


@operation(lambda w: w.model != "sd3")  # its blocks have different forms
def blocks_exchanged(world: World, random: Random) -> None:
    """Two blocks change places."""
    for model in world.each_denoiser():
        if world.is_unet:
            blocks = model.mid_block.resnets
        else:
            blocks = getattr(model, "transformer_blocks", None) or model.layers
        blocks[0], blocks[1] = blocks[1], blocks[0]


@feature()
def layer_wrapped(world: World, random: Random) -> Callable[[], None]:
    """A layer inside another module, as adapters of others do it."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.strength = inner, 1.4

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.strength * self.inner(x)

    ends = ("ff", "conv_out", "feed_forward", "img_mlp", "proj_out")
    names = [n for n, m in world.twin_denoiser.named_modules() if n.endswith(ends)]
    path, _, last = random.choice(names).rpartition(".")
    before = []
    for model in world.each_denoiser():
        parent = model.get_submodule(path)
        before.append((parent, getattr(parent, last)))
        setattr(parent, last, Wrapper(getattr(parent, last)))

    def off() -> None:
        for parent, old in before:
            setattr(parent, last, old)

    return off


@operation(lambda w: not w.adapters)
def denoiser_replaced(world: World, random: Random) -> None:
    """`pipe.unet` or `pipe.transformer` is another model from now on."""
    world.all_off()
    seed = random.randrange(1000)
    for pipe in world.both:
        setattr(pipe, world.part, world.denoiser(world.make(seed)).to(world.dtype))


@operation(lambda w: not w.adapters, weight=0.5)
def pipe_copied(world: World, random: Random) -> None:
    """The copies of both are drawn with from now on."""
    world.all_off()
    pipe, twin = copy.deepcopy(world.pipe), copy.deepcopy(world.twin)
    world.undo()
    world.pipe, world.twin = pipe, twin
    if random.random() < 0.7:
        world.compile()


@operation(lambda w: w.session is not None, weight=0.5, then=("second_pipe_undone",))
def second_pipe(world: World, random: Random) -> None:
    """Another pipeline with the same UNet is compiled, and perhaps undone at once."""
    cls = type(world.pipe)
    other = cls(**world.pipe.components, **EXTRA.get(world.model, {}))
    cls(**world.twin.components, **EXTRA.get(world.model, {}))  # it may correct the scheduler
    other.set_progress_bar_config(disable=True)
    compile_pipe(other, session=world.session, ignores=["vae"])
    if random.random() < 0.5:
        undo_compile(other)
    else:
        world.others.append(other)


@operation(lambda w: any(isinstance(other, DiffusionPipeline) for other in w.others), weight=2)
def second_pipe_undone(world: World, random: Random) -> None:
    found = next(other for other in world.others if isinstance(other, DiffusionPipeline))
    world.others.remove(found)
    undo_compile(found)


@feature(lambda w: w.is_unet and not w.on_gpu and not w.adapters and not w.on, weight=0.5)
def offloaded(world: World, random: Random) -> Callable[[], None]:
    """By accelerate's hooks: weights come for each layer's call and go."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    units: list[Any] = list(world.each_denoiser())
    for model in units:
        cpu_offload(model, execution_device=world.device)

    def off() -> None:
        for model in units:
            remove_hook_from_submodules(model)

    return off

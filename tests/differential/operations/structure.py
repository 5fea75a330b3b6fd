"""Modules moved, replaced, copied and shared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from tests.differential.registry import feature, operation
from tests.differential.world import World


def _convolutions(world: World) -> list[str]:
    return [n for n, m in world.twin.unet.named_modules() if type(m) is nn.Conv2d]


@feature(lambda w: not w.adapters)
def layer_replaced(world: World, random: Random) -> Callable[[], None]:
    name, seed = random.choice(_convolutions(world)), random.randrange(1000)
    path, _, last = name.rpartition(".")
    before = []
    for unet in world.each_unet():
        parent = unet.get_submodule(path)
        old = getattr(parent, last)
        before.append((parent, old))
        torch.manual_seed(seed)
        new = nn.Conv2d(old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding)
        # An offloaded layer's own weight has no contents.
        setattr(parent, last, new.to(world.device, old.weight.dtype).requires_grad_(False))

    def off() -> None:
        for parent, old in before:
            setattr(parent, last, old.to(world.dtype))

    return off


@operation()
def blocks_exchanged(world: World, random: Random) -> None:
    """Two blocks of a UNet change places."""
    for unet in world.each_unet():
        blocks = unet.mid_block.resnets
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

    names = [n for n, m in world.twin.unet.named_modules() if n.endswith("ff") or n == "conv_out"]
    path, _, last = random.choice(names).rpartition(".")
    before = []
    for unet in world.each_unet():
        parent = unet.get_submodule(path)
        before.append((parent, getattr(parent, last)))
        setattr(parent, last, Wrapper(getattr(parent, last)))

    def off() -> None:
        for parent, old in before:
            setattr(parent, last, old)

    return off


@operation(lambda w: not w.adapters)
def unet_replaced(world: World, random: Random) -> None:
    """`pipe.unet` is another model from now on."""
    world.all_off()
    seed = random.randrange(1000)
    for pipe in world.both:
        pipe.unet = world.make(seed).unet.to(world.dtype)


@operation(lambda w: not w.adapters, weight=0.5)
def pipe_copied(world: World, random: Random) -> None:
    """The copies of both are drawn with from now on."""
    world.all_off()
    pipe, twin = copy.deepcopy(world.pipe), copy.deepcopy(world.twin)
    world.undo()
    world.pipe, world.twin = pipe, twin
    if random.random() < 0.7:
        world.compile()


@operation(lambda w: w.session is not None, weight=0.5)
def second_pipe(world: World, random: Random) -> None:
    """Another pipeline with the same UNet is compiled, and perhaps undone at once."""
    cls = type(world.pipe)
    extra = {"add_watermarker": False} if world.model == "sdxl" else {}
    other = cls(
        **world.pipe.components,
        **extra,
        **({} if world.model == "sdxl" else {"requires_safety_checker": False}),
    )
    other.set_progress_bar_config(disable=True)
    compile_pipe(other, session=world.session, ignores=["vae"])
    if random.random() < 0.5:
        undo_compile(other)
    else:
        world.others.append(other)


@operation(lambda w: any(hasattr(other, "unet") for other in w.others), weight=2)
def second_pipe_undone(world: World, random: Random) -> None:
    found = next(other for other in world.others if hasattr(other, "unet"))
    world.others.remove(found)
    undo_compile(found)


@feature(lambda w: not w.on_gpu and not w.adapters and not w.on, weight=0.5)
def offloaded(world: World, random: Random) -> Callable[[], None]:
    """By accelerate's hooks: weights come for each layer's call and go."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    units: list[Any] = list(world.each_unet())
    for unet in units:
        cpu_offload(unet, execution_device=world.device)

    def off() -> None:
        for unet in units:
            remove_hook_from_submodules(unet)

    return off

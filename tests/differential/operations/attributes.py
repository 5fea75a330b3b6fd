"""Attributes of layers and blocks, changed after compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.differential.registry import feature
from tests.differential.world import World


def _modules(world: World, cls: str) -> list[str]:
    return [
        name
        for name, module in world.twin_denoiser.named_modules()
        if type(module).__name__ == cls and not type(module).__module__.startswith("peft.")
    ]


def _set(world: World, names: list[str], attribute: str, value: Any) -> Callable[[], None]:
    """Set an attribute of modules of both UNets; returns what takes it back."""
    before = []
    for model in world.each_denoiser():
        for name in names:
            module = model.get_submodule(name)
            before.append((module, getattr(module, attribute)))
            setattr(module, attribute, value)

    def undo() -> None:
        for module, old in before:
            setattr(module, attribute, old)

    return undo


def _a_block(model: Any) -> nn.Module:
    """The first module with an attention, or a UNet's ResNet block."""
    return next(module for name, module in model.named_modules() if name.endswith((".0", "norm1")))


def _one(world: World, random: Random, cls: str) -> list[str]:
    return [random.choice(_modules(world, cls))]


@feature(lambda w: w.is_unet, weight=2)
def tiling(world: World, random: Random) -> Callable[[], None]:
    return _set(world, _modules(world, "Conv2d"), "padding_mode", "circular")


@feature(lambda w: w.is_unet)
def tiling_of_one_layer(world: World, random: Random) -> Callable[[], None]:
    model = world.twin_denoiser
    names = [n for n in _modules(world, "Conv2d") if model.get_submodule(n).padding[0]]
    return _set(world, [random.choice(names)], "padding_mode", "circular")


@feature(lambda w: w.is_unet)
def output_scale_factor(world: World, random: Random) -> Callable[[], None]:
    return _set(world, _one(world, random, "ResnetBlock2D"), "output_scale_factor", 1.7)


@feature(lambda w: w.is_unet)
def a_number_of_numpy(world: World, random: Random) -> Callable[[], None]:
    """Another one of the same class at each time."""
    factor = np.float32(random.choice((0.6, 1.3, 1.7)))
    return _set(world, _one(world, random, "ResnetBlock2D"), "output_scale_factor", factor)


@feature()
def norm_eps(world: World, random: Random) -> Callable[[], None]:
    cls = random.choice([c for c in ("GroupNorm", "LayerNorm", "RMSNorm") if world.has(c)])
    return _set(world, _one(world, random, cls), "eps", 0.5)


@feature()
def own_dictionary(world: World, random: Random) -> Callable[[], None]:
    """Another ``__dict__`` for a norm, which has another ``eps``."""
    cls, before = (
        random.choice([c for c in ("GroupNorm", "LayerNorm", "RMSNorm") if world.has(c)]),
        [],
    )
    name = _one(world, random, cls)[0]
    for model in world.each_denoiser():
        norm = model.get_submodule(name)
        before.append((norm, norm.__dict__))
        norm.__dict__ = {**norm.__dict__, "eps": 0.5}

    def undo() -> None:
        for norm, old in before:
            norm.__dict__ = {**norm.__dict__, "eps": old["eps"]}

    return undo


@feature(lambda w: w.is_unet)
def names_of_weights(world: World, random: Random) -> Callable[[], None]:
    """A norm's weight is its bias now, and the reverse: the same tensors in the same order."""
    name = _one(world, random, "GroupNorm")[0]
    norms = [model.get_submodule(name) for model in world.each_denoiser()]

    def exchange() -> None:
        for norm in norms:
            names, tensors = zip(*norm.named_parameters(recurse=False), strict=True)
            for each in names:
                delattr(norm, each)
            for each, tensor in zip(reversed(names), tensors, strict=True):
                setattr(norm, each, tensor)

    exchange()
    return exchange


@feature(lambda w: w.is_unet)
def attention_heads(world: World, random: Random) -> Callable[[], None]:
    """Twice as many heads, of half the width."""
    names = _one(world, random, "Attention")
    heads = world.twin_denoiser.get_submodule(names[0]).heads
    return _set(world, names, "heads", 2 * heads)


@feature(lambda w: w.is_unet)
def attention_rescale(world: World, random: Random) -> Callable[[], None]:
    return _set(world, _one(world, random, "Attention"), "rescale_output_factor", 2.5)


@feature(lambda w: w.is_unet)
def nonlinearity(world: World, random: Random) -> Callable[[], None]:
    before = []
    name = _one(world, random, "ResnetBlock2D")[0]
    for model in world.each_denoiser():
        block = model.get_submodule(name)
        before.append((block, block.nonlinearity))
        block.nonlinearity = nn.Mish()

    def undo() -> None:
        for block, old in before:
            block.nonlinearity = old

    return undo


@feature(lambda w: w.is_unet)
def dilation(world: World, random: Random) -> Callable[[], None]:
    """Change dilations like ScaleCrafter and HiDiffusion, at the same output size."""
    names = [
        name
        for name in _modules(world, "Conv2d")
        if (conv := world.twin_denoiser.get_submodule(name)).padding == (1, 1)
        and conv.stride == (1, 1)
    ]
    name = [random.choice(names)]
    undo = [_set(world, name, "dilation", (2, 2)), _set(world, name, "padding", (2, 2))]
    return lambda: [each() for each in undo]  # type: ignore[return-value]


@feature(lambda w: w.is_unet, weight=4)
def conv_forward(world: World, random: Random) -> Callable[[], None]:
    """An instance's `_conv_forward`, as tiling extensions replace it."""
    names, undo = _modules(world, "Conv2d"), []
    name = random.choice(names)
    for model in world.each_denoiser():
        conv = model.get_submodule(name)

        def doubled(x: Any, weight: Any, bias: Any, conv: Any = conv) -> Any:
            return 1.5 * type(conv)._conv_forward(conv, x, weight, bias)

        conv._conv_forward = doubled
        undo.append(conv)

    def off() -> None:
        for conv in undo:
            vars(conv).pop("_conv_forward", None)

    return off


@feature(lambda w: w.is_unet, weight=2)
def freeu(world: World, random: Random) -> Callable[[], None]:
    s1, s2 = random.choice((0.9, 0.6)), random.choice((0.2, 0.5))
    for model in world.each_denoiser():
        model.enable_freeu(s1, s2, 1.2, 1.4)
    return lambda: [model.disable_freeu() for model in world.each_denoiser()]  # type: ignore[return-value]


@feature()
def training_mode(world: World, random: Random) -> Callable[[], None]:
    for model in world.each_denoiser():
        model.train()
    return lambda: [model.eval() for model in world.each_denoiser()]  # type: ignore[return-value]


@feature()
def marker(world: World, random: Random) -> Callable[[], None]:
    """A foreign attribute that decides nothing."""
    units = list(world.each_denoiser())
    for model in units:
        _a_block(model).note_of_an_extension = {"seen": [1]}

    def off() -> None:
        for model in units:
            vars(_a_block(model)).pop("note_of_an_extension", None)

    return off


@feature(lambda w: w.is_unet)
def chunked_feed_forward(world: World, random: Random) -> Callable[[], None]:
    def blocks() -> Iterator[Any]:
        for model in world.each_denoiser():
            for module in model.modules():
                if hasattr(module, "set_chunk_feed_forward"):
                    yield module

    for block in blocks():
        block.set_chunk_feed_forward(None, 0)
        block._chunk_size, block._chunk_dim = 1, 0
    return lambda: [b.set_chunk_feed_forward(None, 0) for b in blocks()]  # type: ignore[return-value]


@feature()
def torch_flags(world: World, random: Random) -> Callable[[], None]:
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    if random.random() < 0.5:
        torch.set_float32_matmul_precision("high")
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)

    def off() -> None:
        torch.set_float32_matmul_precision(before[0])
        torch.use_deterministic_algorithms(before[1])

    return off

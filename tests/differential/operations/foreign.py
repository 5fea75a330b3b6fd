"""Hooks, forwards and modes of others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.differential.registry import feature, operation
from tests.differential.world import World


def _scaled(output: Any, factor: float) -> Any:
    """An output's tensors, scaled; a block of two streams returns two."""
    if isinstance(output, (tuple, list)):
        return type(output)(_scaled(each, factor) for each in output)
    return factor * output if isinstance(output, torch.Tensor) else output


def _module(world: World, random: Random) -> str:
    """A layer, a block, or the whole UNet."""
    model = world.twin_denoiser
    layers = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    blocks = [n for n, m in model.named_modules() if type(m).__name__ in _BLOCKS]
    return random.choice([*random.sample(layers, 2), *random.sample(blocks, 2)])


_BLOCKS = (
    *("ResnetBlock2D", "BasicTransformerBlock", "Attention"),
    *("JointTransformerBlock", "FluxTransformerBlock", "FluxSingleTransformerBlock"),
    *("FluxAttention", "QwenImageTransformerBlock", "ZImageTransformerBlock"),
)


@feature(weight=2)
def hook(world: World, random: Random) -> Callable[[], None]:
    name = _module(world, random)
    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, i, o: _scaled(o, 1.3))
        for model in world.each_denoiser()
    ]
    return lambda: [handle.remove() for handle in handles]  # type: ignore[return-value]


@feature()
def pre_hook(world: World, random: Random) -> Callable[[], None]:
    name = _module(world, random)

    def scaled(module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (_scaled(args[0], 0.8), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": 0.8 * kwargs["hidden_states"]}

    handles = [
        model.get_submodule(name).register_forward_pre_hook(scaled, with_kwargs=True)
        for model in world.each_denoiser()
    ]
    return lambda: [handle.remove() for handle in handles]  # type: ignore[return-value]


@feature()
def hook_on_the_model(world: World, random: Random) -> Callable[[], None]:
    def scaled(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return _scaled(output, 0.9)
        output.sample = _scaled(output.sample, 0.9)
        return output

    handles = [model.register_forward_hook(scaled) for model in world.each_denoiser()]
    return lambda: [handle.remove() for handle in handles]  # type: ignore[return-value]


@feature()
def global_hook(world: World, random: Random) -> Callable[[], None]:
    cls = random.choice((nn.Linear, nn.Conv2d, nn.GroupNorm))
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 1.2 * output if type(module) is cls else None
    )
    return handle.remove


@feature()
def global_pre_hook(world: World, random: Random) -> Callable[[], None]:
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (0.9 * args[0],) if type(module) is nn.Linear else None
    )
    return handle.remove


@feature(weight=2)  # most layers belong to no graph
def forward_replaced(world: World, random: Random) -> Callable[[], None]:
    """An instance's, around what is there."""
    name = _module(world, random)
    changed = []
    for model in world.each_denoiser():
        module = model.get_submodule(name)
        before = module.forward
        changed.append((module, "forward" in vars(module), before))

        def forward(*args: Any, before: Any = before, **kwargs: Any) -> Any:
            return _scaled(before(*args, **kwargs), 1.1)

        module.forward = forward

    def off() -> None:
        for module, own, before in changed:
            if own:
                module.forward = before
            else:
                del module.forward

    return off


@feature()
def class_patched(world: World, random: Random) -> Callable[[], None]:
    """A block's or a layer's class."""
    from diffusers.models import attention, resnet

    cls: Any = random.choice((resnet.ResnetBlock2D, attention.FeedForward, nn.GroupNorm))
    if not world.is_unet:
        modules = world.twin_denoiser.modules()
        known = {type(m) for m in modules if type(m).__name__ in (*_BLOCKS, "LayerNorm")}
        cls = random.choice(sorted(known, key=str))
    before = cls.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _scaled(before(self, *args, **kwargs), 0.8)

    cls.forward = forward

    def off() -> None:
        cls.forward = before

    return off


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; the result puts back what was there."""
    own, before = name in vars(owner) or name == "__code__", getattr(owner, name)
    setattr(owner, name, value)

    def off() -> None:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return off


@feature(weight=2)
def known_code_exchanged(world: World, random: Random) -> Callable[[], None]:
    """Torch's own code in the place of other code of torch."""
    exchanges: list[tuple[Any, str, Any]] = [
        (nn.functional, "silu", nn.functional.mish),
        (nn.functional.silu, "__code__", nn.functional.relu6.__code__),
        (nn.SiLU, "forward", nn.Mish.forward),
        (nn.LayerNorm, "forward", nn.Identity.forward),
    ]
    if world.is_unet:  # transformers say the scale themselves
        scaled = partial(nn.functional.scaled_dot_product_attention, scale=0.02)
        exchanges.append((nn.functional, "scaled_dot_product_attention", scaled))
    return _set(*random.choice(exchanges))


@feature(weight=3)
def patched_for_a_part_of_each_forward(world: World, random: Random) -> Callable[[], None]:
    """Hooks around some blocks put a function in, and take it back behind them."""
    modules = world.twin_denoiser.named_modules()
    # A hook inside of a block takes the block out of its graph.
    around = ("DownBlock", "UpBlock", "MidBlock") if world.is_unet else ("TransformerBlock",)
    name = random.choice([n for n, m in modules if any(a in type(m).__name__ for a in around)])
    exchanges: list[tuple[Any, str, Any]] = [(nn.Linear, "forward", _louder_linear)]
    if world.is_unet:
        exchanges.append((nn.functional, "silu", nn.functional.mish))
    owner, attribute, replacement = random.choice(exchanges)
    takes_back: list[Callable[[], None]] = []

    def put_in(*_: Any) -> None:
        takes_back.append(_set(owner, attribute, replacement))

    def take_back(*_: Any) -> None:
        takes_back.pop()()

    handles = []
    for model in world.each_denoiser():
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(put_in))
        handles.append(module.register_forward_hook(take_back, always_call=True))
    return lambda: [handle.remove() for handle in handles]  # type: ignore[return-value]


def _louder_linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return 1.1 * nn.functional.linear(x, layer.weight, layer.bias)


class _Louder(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return 1.1 * output if func is nn.functional.linear else output


class _Softer(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return 0.9 * output if func is torch.ops.aten.silu.default else output


@feature()
def function_mode(world: World, random: Random) -> Callable[[], None]:
    world.picture.mode = _Louder

    def off() -> None:
        world.picture.mode = None

    return off


@feature(lambda w: not w.on_gpu)
def dispatch_mode(world: World, random: Random) -> Callable[[], None]:
    world.picture.mode = _Softer

    def off() -> None:
        world.picture.mode = None

    return off


@feature(lambda w: w.most_images is None)
def forward_that_counts(world: World, random: Random) -> Callable[[], None]:
    """A layer whose result depends on how often it ran."""
    changed = []
    modules = world.twin_denoiser.named_modules()
    name = random.choice([n for n, m in modules if type(m) is nn.Linear])
    for model in world.each_denoiser():
        layer = model.get_submodule(name)
        own = layer.forward
        seen = [0]
        world.counters.append(seen)

        def forward(*args: Any, own: Any = own, seen: list[int] = seen) -> Any:
            seen[0] += 1
            return own(*args) * (1 + 0.1 * (seen[0] % 7))

        layer.forward = forward
        changed.append(layer)
    return lambda: [vars(layer).pop("forward", None) for layer in changed]  # type: ignore[return-value]


@operation()
def weak_references_die(world: World, random: Random) -> None:
    import gc

    gc.collect()

"""Attention processors, and what they call."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from diffusers.models import attention_processor
from torch.nn import functional

from tests.differential.registry import feature, operation
from tests.differential.world import World
from tests.support.ldm_stand_in import live_in


def _scaled(output: Any, factor: float) -> Any:
    if isinstance(output, tuple):
        return tuple(_scaled(each, factor) for each in output)
    return factor * output


def _own_class() -> type:
    class AttnProcessor2_0:  # noqa: N801
        """The name of diffusers' own, with a state."""

        def __init__(self, own: Any, gain: list[float]) -> None:
            self.own, self.gain = own, gain

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _scaled(self.own(*args, **kwargs), self.gain[0])

    return AttnProcessor2_0


class Store:
    """Keeps a mean of what it has seen, as prompt-to-prompt's attention stores do, and uses it."""

    def __init__(self, own: Any, calls: list[int]) -> None:
        self.calls, self.own = calls, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls[0] += 1
        return _scaled(self.own(*args, **kwargs), 1 + 0.1 * (self.calls[0] % 5))


class FirstImage:
    """All images of a batch attend to the first one."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if encoder_hidden_states is None:
            encoder_hidden_states = hidden_states[:1].expand_as(hidden_states)
        return attention_processor.AttnProcessor2_0()(
            attn, hidden_states, encoder_hidden_states, attention_mask
        )


live_in(FirstImage, "diffusers.pipelines.made_for_a_test")


def _set_processors(world: World, make: Callable[[Any], Any], some: int = 1) -> Callable[[], None]:
    """Put other processors in the place of some; `make` takes the processor that was there."""
    kept = []
    for model in world.each_denoiser():
        modules = [m for m in model.modules() if vars(m).get("processor") is not None]
        for module in modules[::some]:
            kept.append((module, module.processor))
            module.processor = make(module.processor)

    def off() -> None:
        for module, processor in kept:
            module.processor = processor

    return off


@feature(lambda w: w.processors_are_free, weight=2, then=("own_processors_state",))
def own_processor(world: World, random: Random) -> Callable[[], None]:
    """Of a class with the name of diffusers' own."""
    cls, some = _own_class(), random.choice((1, 3))
    world.gains = [[1.5]]
    return _set_processors(world, lambda own: cls(own, world.gains[0]), some)


@operation(lambda w: "own_processor" in w.on, weight=6)
def own_processors_state(world: World, random: Random) -> None:
    """Changed in place."""
    value = random.choice((0.3, 1.0, 2.0))
    for gain in world.gains:
        gain[0] = value


@feature(lambda w: w.processors_are_free and w.most_images is None)
def stateful_processor(world: World, random: Random) -> Callable[[], None]:
    def make(own: Any) -> Store:
        world.counters.append([0])
        return Store(own, world.counters[-1])

    return _set_processors(world, make, random.choice((1, 2)))


@feature(lambda w: w.is_unet and w.processors_are_free, then=("no_memory_for_batches_on",))
def images_see_each_other(world: World, random: Random) -> Callable[[], None]:
    """An attention processor like diffusers' for the frames of a video."""
    world.picture.batch = 2
    return _set_processors(world, lambda own: FirstImage())


@feature(lambda w: w.is_unet and w.processors_are_free)
def plain_processor(world: World, random: Random) -> Callable[[], None]:
    """Without torch's own attention."""
    return _set_processors(world, lambda own: attention_processor.AttnProcessor())


@feature(lambda w: w.is_unet and w.processors_are_free)
def sliced(world: World, random: Random) -> Callable[[], None]:
    kept = [(model, dict(model.attn_processors)) for model in world.each_denoiser()]
    for pipe in world.both:
        pipe.enable_attention_slicing(1)

    def off() -> None:
        for model, processors in kept:
            model.set_attention_slice(None) if hasattr(model, "set_attention_slice") else None
            model.set_attn_processor(processors)

    return off


@feature()
def processors_call_patched(world: World, random: Random) -> Callable[[], None]:
    """`__call__` of diffusers' own class."""
    found = {type(vars(m).get("processor")) for m in world.twin_denoiser.modules()}
    found.discard(type(None))
    cls = min(found, key=str, default=attention_processor.AttnProcessor2_0)
    before = cls.__call__

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _scaled(before(self, *args, **kwargs), 0.7)

    cls.__call__ = patched  # type: ignore[method-assign]

    def off() -> None:
        cls.__call__ = before  # type: ignore[method-assign]

    return off


@feature()
def attention_function_replaced(world: World, random: Random) -> Callable[[], None]:
    """`torch.nn.functional.scaled_dot_product_attention`, as SageAttention is put in."""
    before = functional.scaled_dot_product_attention

    def replaced(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return before(0.6 * query, *args, **kwargs)

    functional.scaled_dot_product_attention = replaced

    def off() -> None:
        functional.scaled_dot_product_attention = before

    return off


@feature()
def function_replaced(world: World, random: Random) -> Callable[[], None]:
    """Another of torch's functions."""
    name = random.choice(("group_norm", "linear", "layer_norm", "silu", "gelu"))
    before = getattr(functional, name)
    setattr(functional, name, lambda *args, **kwargs: 0.9 * before(*args, **kwargs))
    return lambda: setattr(functional, name, before)


@feature(lambda w: w.model not in ("sd3", "z_image") and not w.adapters and w.processors_are_free)
def qkv_fused(world: World, random: Random) -> Callable[[], None]:
    if not world.is_unet:
        for model in world.each_denoiser():
            model.fuse_qkv_projections()
        models = list(world.each_denoiser())
        return lambda: [m.unfuse_qkv_projections() for m in models]  # type: ignore[return-value]
    for pipe in world.both:
        pipe.fuse_qkv_projections(vae=False)
    pipes = world.both
    return lambda: [p.unfuse_qkv_projections(vae=False) for p in pipes]  # type: ignore[return-value]


@operation(lambda w: w.processors_are_free)
def processors_made_again(world: World, random: Random) -> None:
    """New objects of the same class."""
    for model in world.each_denoiser():
        for module in model.modules():
            if vars(module).get("processor") is not None:
                module.processor = type(module.processor)()

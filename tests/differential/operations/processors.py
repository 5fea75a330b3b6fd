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


def _own_class() -> type:
    class AttnProcessor2_0:  # noqa: N801
        """The name of diffusers' own, with a state."""

        def __init__(self, gain: list[float]) -> None:
            self.gain = gain
            self._own = attention_processor.AttnProcessor2_0()

        def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return self.gain[0] * self._own(attn, hidden_states, *args, **kwargs)

    return AttnProcessor2_0


class Store:
    """Keeps a mean of what it has seen, as prompt-to-prompt's attention stores do, and uses it."""

    def __init__(self) -> None:
        self.calls = 0
        self._own = attention_processor.AttnProcessor2_0()

    def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        out = self._own(attn, hidden_states, *args, **kwargs)
        return out * (1 + 0.1 * (self.calls % 5))


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


def _set_processors(world: World, make: Callable[[], Any], some: int = 1) -> Callable[[], None]:
    kept = []
    for unet in world.each_unet():
        kept.append((unet, dict(unet.attn_processors)))
        processors = dict(unet.attn_processors)
        for name in sorted(processors)[::some]:
            processors[name] = make()
        unet.set_attn_processor(processors)

    def off() -> None:
        for unet, processors in kept:
            unet.set_attn_processor(processors)

    return off


def _free(world: World) -> bool:
    taken = {"own_processor", "stateful_processor", "plain_processor", "sliced", "ip_adapter"}
    return not (taken | {"qkv_fused", "images_see_each_other"}) & world.on.keys()


@feature(_free, weight=2)
def own_processor(world: World, random: Random) -> Callable[[], None]:
    """Of a class with the name of diffusers' own."""
    cls, some = _own_class(), random.choice((1, 3))
    world.gains = [[1.5], [1.5]]
    gains = iter(world.gains)
    kept = []
    for unet, gain in zip(world.each_unet(), gains, strict=True):
        kept.append((unet, dict(unet.attn_processors)))
        processors = dict(unet.attn_processors)
        for name in sorted(processors)[::some]:
            processors[name] = cls(gain)
        unet.set_attn_processor(processors)

    def back() -> None:
        for unet, processors in kept:
            unet.set_attn_processor(processors)

    return back


@operation(lambda w: "own_processor" in w.on, weight=6)
def own_processors_state(world: World, random: Random) -> None:
    """Changed in place."""
    value = random.choice((0.3, 1.0, 2.0))
    for gain in world.gains:
        gain[0] = value


@feature(lambda w: _free(w) and w.most_images is None)
def stateful_processor(world: World, random: Random) -> Callable[[], None]:
    return _set_processors(world, Store, random.choice((1, 2)))


@feature(_free)
def images_see_each_other(world: World, random: Random) -> Callable[[], None]:
    """An attention processor like diffusers' for the frames of a video."""
    world.picture.batch = 2
    return _set_processors(world, FirstImage)


@feature(_free)
def plain_processor(world: World, random: Random) -> Callable[[], None]:
    """Without torch's own attention."""
    return _set_processors(world, attention_processor.AttnProcessor)


@feature(lambda w: "ip_adapter" not in w.on and _free(w))
def sliced(world: World, random: Random) -> Callable[[], None]:
    kept = [(unet, dict(unet.attn_processors)) for unet in world.each_unet()]
    for pipe in world.both:
        pipe.enable_attention_slicing(1)

    def off() -> None:
        for unet, processors in kept:
            unet.set_attention_slice(None) if hasattr(unet, "set_attention_slice") else None
            unet.set_attn_processor(processors)

    return off


@feature()
def processors_call_patched(world: World, random: Random) -> Callable[[], None]:
    """`__call__` of diffusers' own class."""
    cls = attention_processor.AttnProcessor2_0
    before = cls.__call__

    def patched(self: Any, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return 0.7 * before(self, attn, hidden_states, *args, **kwargs)

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


@feature(lambda w: not w.adapters and _free(w))
def qkv_fused(world: World, random: Random) -> Callable[[], None]:
    for pipe in world.both:
        pipe.fuse_qkv_projections(vae=False)
    pipes = world.both
    return lambda: [p.unfuse_qkv_projections(vae=False) for p in pipes]  # type: ignore[return-value]


@operation(_free)
def processors_made_again(world: World, random: Random) -> None:
    """New objects of the same class."""
    for unet in world.each_unet():
        unet.set_attn_processor(attention_processor.AttnProcessor2_0())

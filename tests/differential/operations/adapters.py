"""LoRAs and IP-Adapters."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from peft.utils.hotswap import prepare_model_for_compiled_hotswap

from tests.differential.drawing import LORA_SCALE_IN
from tests.differential.registry import feature, operation
from tests.differential.world import TRANSFORMERS, World
from tests.support import adapter_weights
from tests.support.transformer_models import lora_state

_NAMES = ("x", "y", "z")
_TARGETS = {
    "x": ["to_q", "to_k", "to_v", "to_out.0"],
    "y": ["conv1", "conv2", "ff.net.0.proj", "proj_in"],
    "z": ["to_q", "time_emb_proj", "conv_in"],
}


def _loaded(world: World) -> bool:
    return bool(world.adapters) and not _fused(world)


def _fused(world: World) -> bool:
    return world.adapters.get("fused", False)


def _names(world: World) -> list[str]:
    return sorted(name for name in world.adapters if name in _NAMES)


def _targets(world: World, name: str) -> list[str]:
    """Layers of a transformer, as `_TARGETS`."""
    layers = TRANSFORMERS[world.model].lora_layers
    return {"x": ["to_q", "to_k", "to_v"], "y": list(layers[1:]), "z": list(layers)}[name]


def _layers(model: Any, name: str) -> list[Any]:
    return [m for m in model.modules() if name in getattr(m, "lora_A", {})]


# What is done to a LoRA that has come. A picture or two come first, or nothing of it is captured.
_TO_A_LORA = (
    *("again", "lora_weights", "lora_off", "lora_hotswap", "lora_fuse", "lora_scale_of_the_call"),
    *("lora_data_written", "lora_written_in_place", "lora_scaling_written"),
)


@operation(
    lambda w: len(_names(w)) < 2 and not _fused(w) and not w.no_adapters,
    weight=4,
    then=_TO_A_LORA,
)
def lora_add(world: World, random: Random) -> None:
    from peft import LoraConfig

    name = random.choice(sorted(set(_NAMES) - set(_names(world))))
    rank, seed = random.choice((2, 4)), random.randrange(1000)
    targets = _TARGETS[name] if world.is_unet else _targets(world, name)
    for model in world.each_denoiser():
        torch.manual_seed(seed)
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights=False
        )
        model.add_adapter(config, adapter_name=name)
    world.adapters[name] = True


@operation(_loaded, weight=3)
def lora_weights(world: World, random: Random) -> None:
    names = _names(world)
    chosen = random.sample(names, random.randint(1, len(names)))
    weights = [random.choice((0.3, -0.7, 1.0, 0.0)) for _ in chosen]
    for pipe in world.both:
        world.denoiser(pipe).set_adapters(chosen, weights)


@operation(_loaded, then=("size", "lora_on"))
def lora_off(world: World, random: Random) -> None:
    for model in world.each_denoiser():
        model.disable_adapters()


@operation(_loaded, weight=2)
def lora_on(world: World, random: Random) -> None:
    for model in world.each_denoiser():
        model.enable_adapters()


@operation(_loaded)
def lora_delete(world: World, random: Random) -> None:
    name = random.choice(_names(world))
    for model in world.each_denoiser():
        model.delete_adapters(name)
    del world.adapters[name]
    _unload_if_empty(world)


def _unload_if_empty(world: World) -> None:
    if not _names(world):
        for model in world.each_denoiser():
            model.unload_lora()
        world.adapters.clear()


@operation(_loaded)
def lora_unload(world: World, random: Random) -> None:
    for model in world.each_denoiser():
        model.unload_lora()
    world.adapters.clear()


@operation(_loaded, then=("lora_unfuse", "weight_in_place", "weight_data_in_place"))
def lora_fuse(world: World, random: Random) -> None:
    scale = random.choice((1.0, 0.6))
    for pipe in world.both:
        pipe.fuse_lora(components=[world.part], lora_scale=scale)
    world.adapters["fused"] = True


@operation(_fused, weight=4)
def lora_unfuse(world: World, random: Random) -> None:
    for pipe in world.both:
        pipe.unfuse_lora(components=[world.part])
    del world.adapters["fused"]


@operation(_loaded, weight=2)
def lora_hotswap(world: World, random: Random) -> None:
    """Another LoRA in the place of one that is loaded, as diffusers swaps it."""
    from peft.utils import get_peft_model_state_dict

    name, seed = random.choice(_names(world)), random.randrange(1000)
    for model in world.each_denoiser():
        generator = torch.Generator().manual_seed(seed)
        state = get_peft_model_state_dict(model, adapter_name=name)
        other = {
            key: (0.2 * torch.randn(value.shape, generator=generator)).to(value)
            for key, value in state.items()
        }
        model.load_lora_adapter(other, prefix=None, adapter_name=name, hotswap=True)


@operation(_loaded)
def lora_data_written(world: World, random: Random) -> None:
    """Past the version counter."""
    name, factor = random.choice(_names(world)), random.choice((-1.0, 0.5))
    for model in world.each_denoiser():
        for layer in _layers(model, name):
            layer.lora_B[name].weight.data.mul_(factor)


@operation(_loaded)
def lora_written_in_place(world: World, random: Random) -> None:
    # It grows as often as it shrinks: with a large LoRA, rounding alone makes other pictures.
    name, factor = random.choice(_names(world)), random.choice((-1.5, -2 / 3))
    for model in world.each_denoiser():
        for layer in _layers(model, name)[::2]:
            with torch.no_grad():
                layer.lora_A[name].weight.mul_(factor)


@operation(_loaded)
def lora_scaling_written(world: World, random: Random) -> None:
    """Set a scale in place, like `set_scale` of peft's layers."""
    name, scale = random.choice(_names(world)), random.choice((0.1, 2.0))
    for model in world.each_denoiser():
        for layer in _layers(model, name):
            if isinstance(layer.scaling[name], torch.Tensor):
                layer.scaling[name].fill_(scale)
            else:
                layer.scaling[name] = scale


@operation(_loaded, then=("again", "lora_scaling_written", "lora_hotswap"))
def lora_scales_are_tensors(world: World, random: Random) -> None:
    """As diffusers' `enable_lora_hotswap` has peft prepare a LoRA."""
    for model in world.each_denoiser():
        prepare_model_for_compiled_hotswap(model)


@operation(lambda w: _loaded(w) and w.model in LORA_SCALE_IN, weight=2)
def lora_scale_of_the_call(world: World, random: Random) -> None:
    """``cross_attention_kwargs={"scale": …}``"""
    other = [scale for scale in (None, 0.3, 1.5) if scale != world.picture.lora_scale]
    world.picture.lora_scale = random.choice(other)


@operation(lambda w: not w.adapters and not w.no_adapters, then=_TO_A_LORA)
def lora_from_a_file(world: World, random: Random) -> None:
    """Load a LoRA from a state dict with diffusers' own names."""
    from tests.support.adapter_weights import lora_tensors

    seed = random.randrange(1000)
    if world.is_unet:
        state = lora_tensors(world.twin, text=False, rank=2, seed=seed)
    else:
        layers = TRANSFORMERS[world.model].lora_layers
        state = lora_state(world.twin_denoiser, layers, rank=2, seed=seed)
    for pipe in world.both:
        pipe.load_lora_weights(
            {k: v.to(world.device, world.dtype) for k, v in state.items()}, adapter_name="x"
        )
    world.adapters["x"] = True


@feature(
    lambda w: w.is_unet and not w.adapters and w.processors_are_free,
    weight=4,
    then=("ip_adapter_scale", "ip_adapter_image"),
)
def ip_adapter(world: World, random: Random) -> Callable[[], None]:
    seed = random.randrange(1000)
    kept = [(m, m.attn_processors, dict(m.config)) for m in world.each_denoiser()]
    for pipe in world.both:
        tensors = adapter_weights.ip_adapter_tensors(world.denoiser(pipe), seed, world.dtype)
        world.denoiser(pipe)._load_ip_adapter_weights([tensors], low_cpu_mem_usage=False)
        pipe.set_ip_adapter_scale(0.8)
    seeds = [random.randrange(1000)]

    def embeds(world: World) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(seeds[0])
        count = 1 if world.picture.guidance <= 1 else 2
        images = torch.randn(2, 1, adapter_weights.IMAGE_WIDTH, generator=made)[:count]
        return [images.to(world.device, world.dtype)]

    world.picture.extra["ip_adapter_image_embeds"] = embeds
    world.ip_images = seeds
    world.picture.way = "pipe"

    def off() -> None:
        world.picture.extra.pop("ip_adapter_image_embeds", None)
        for model, processors, config in kept:
            model.encoder_hid_proj = None
            model.config["encoder_hid_dim_type"] = config["encoder_hid_dim_type"]
            model.config.encoder_hid_dim_type = None
            model.set_attn_processor(dict(processors))

    return off


@operation(lambda w: "ip_adapter" in w.on, weight=6)
def ip_adapter_scale(world: World, random: Random) -> None:
    scale = random.choice((0.0, 0.2, 1.0))
    for pipe in world.both:
        pipe.set_ip_adapter_scale(scale)


@operation(lambda w: "ip_adapter" in w.on, weight=4)
def ip_adapter_image(world: World, random: Random) -> None:
    world.ip_images[0] = random.randrange(1000)

"""The UNet's weights, written and replaced in every way that torch has."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.validity.tensor_contents import version_of
from tests.differential.registry import operation
from tests.differential.world import World, cast


def _plain(world: World) -> bool:
    """Whether weights have their own names and places: no wrappers, nothing moved away."""
    return not world.adapters and not {"offloaded", "qkv_fused", "layer_replaced"} & world.on.keys()


def _names(world: World) -> list[str]:
    return [name for name, weight in world.twin_denoiser.named_parameters() if weight.ndim >= 2]


def _weight(model: Any, name: str) -> tuple[nn.Module, str, nn.Parameter]:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return module, last, getattr(module, last)


def counts_no_versions(weight: torch.Tensor) -> bool:
    """Whether it was made under inference mode. A cast, also of its memory format, hides that from
    `is_inference`."""
    return version_of(weight) < 0


def _factor(random: Random) -> float:
    return random.choice((0.5, -1.0, 1.3))


@operation(_plain, weight=2)
def weight_in_place(world: World, random: Random) -> None:
    name, factor = random.choice(_names(world)), _factor(random)
    for model in world.each_denoiser():
        weight = _weight(model, name)[2]
        # Leaving inference mode switches gradients on, so `no_grad` comes second.
        with torch.inference_mode(counts_no_versions(weight)), torch.no_grad():
            weight.mul_(factor)


@operation(_plain)
def weight_data_in_place(world: World, random: Random) -> None:
    """Past the version counter."""
    name, factor = random.choice(_names(world)), _factor(random)
    for model in world.each_denoiser():
        _weight(model, name)[2].data.mul_(factor)


@operation(_plain, weight=2)
def weight_data_replaced(world: World, random: Random) -> None:
    name, factor = random.choice(_names(world)), _factor(random)
    for model in world.each_denoiser():
        weight = _weight(model, name)[2]
        weight.data = factor * weight.data


@operation(_plain, weight=2)
def parameter_replaced(world: World, random: Random) -> None:
    name, factor = random.choice(_names(world)), _factor(random)
    for model in world.each_denoiser():
        module, last, weight = _weight(model, name)
        setattr(module, last, nn.Parameter(factor * weight.detach(), weight.requires_grad))


@operation(_plain)
def weights_exchanged(world: World, random: Random) -> None:
    """Two weights of one shape: their data change places."""
    names = _names(world)
    one = random.choice(names)
    shape = _weight(world.twin_denoiser, one)[2].shape
    same = [n for n in names if n != one and _weight(world.twin_denoiser, n)[2].shape == shape]
    other = random.choice(same or [one])
    for model in world.each_denoiser():
        a, b = _weight(model, one)[2], _weight(model, other)[2]
        a.data, b.data = b.data, a.data


@operation(_plain)
def weight_written_under_inference_mode(world: World, random: Random) -> None:
    name, factor = random.choice(_names(world)), _factor(random)
    for model in world.each_denoiser():
        weight = _weight(model, name)[2]
        with torch.inference_mode():
            weight.data.copy_(factor * weight.data)


@operation(_plain, then=("weight_in_place", "weight_data_in_place"))
def weight_made_under_inference_mode(world: World, random: Random) -> None:
    """A tensor that counts no versions, then written in place."""
    name, factor = random.choice(_names(world)), _factor(random)
    for model in world.each_denoiser():
        module, last, weight = _weight(model, name)
        with torch.inference_mode():
            other = nn.Parameter(factor * weight.detach(), requires_grad=False)
        module._parameters[last] = other


@operation(_plain)
def state_dict_loaded(world: World, random: Random) -> None:
    """Another checkpoint, copied into the same weights."""
    seed = random.randrange(1000)
    state = world.denoiser(world.make(seed)).state_dict()
    for model in world.each_denoiser():
        with torch.inference_mode(any(map(counts_no_versions, model.parameters()))):
            model.load_state_dict(state, strict=False)  # without projections that were joined


@operation(_plain)
def state_dict_assigned(world: World, random: Random) -> None:
    state = world.denoiser(world.make(random.randrange(1000))).state_dict()
    for model in world.each_denoiser():
        model.load_state_dict({k: v.clone() for k, v in state.items()}, strict=False, assign=True)
        model.requires_grad_(False)


def _gets_other_data(world: World) -> bool:
    """Whether eager can draw once all weights have other data.

    A weight made under inference mode has no version counter, and torch makes no views of it
    afterwards, which its linear layers do on a GPU.
    """
    weights = world.twin_denoiser.parameters()
    return _plain(world) and not (world.on_gpu and any(map(counts_no_versions, weights)))


@operation(_gets_other_data)
def all_weights_move(world: World, random: Random) -> None:
    """Give every weight a new address, as when a model leaves the GPU and returns: no weight lies
    where another one did."""
    weights = [w for m in world.each_denoiser() for w in (*m.parameters(), *m.buffers())]
    copies = [weight.data.clone() for weight in weights]
    for weight, copy in zip(weights, copies, strict=True):
        weight.data = copy


@operation(_plain)
def storage_shrinks_and_returns(world: World, random: Random) -> None:
    """Free the storages and fill them again, as some offloading does."""
    name = random.choice(_names(world))
    for model in world.each_denoiser():
        storage = _weight(model, name)[2].untyped_storage()
        if not storage.resizable():
            continue  # of another library's memory
        content, size = storage.clone(), storage.nbytes()
        storage.resize_(0)
        world.others.append(torch.empty(size, dtype=torch.uint8, device=world.device).fill_(255))
        storage.resize_(size)
        storage.copy_(content)


@operation(weight=2, then=("autocast",))
def requires_grad(world: World, random: Random) -> None:
    """Switch `requires_grad` of the weights on, as `from_pretrained` leaves it, or off."""
    wanted = random.random() < 0.6
    for model in world.each_denoiser():
        for weight in model.parameters():
            if not counts_no_versions(weight):
                weight.requires_grad_(wanted)


def _can_be_cast(world: World) -> bool:
    return _gets_other_data(world) and "ip_adapter" not in world.on


@operation(_can_be_cast)
def dtype(world: World, random: Random) -> None:
    kinds = (torch.float16, torch.bfloat16) if world.on_gpu else (torch.float32, torch.bfloat16)
    world.dtype = random.choice((*kinds, kinds[0]))
    for model in world.each_denoiser():
        model.to(world.dtype)
    world.picture.prompts = cast(world.picture.prompts, world.dtype)


@operation(_plain)
def memory_format(world: World, random: Random) -> None:
    formats = (torch.channels_last, torch.contiguous_format)
    chosen = random.choice(formats)
    for model in world.each_denoiser():
        model.to(memory_format=chosen)

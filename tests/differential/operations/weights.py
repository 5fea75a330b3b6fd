"""The UNet's weights, written and replaced in every way that torch has."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import nn

from tests.differential.registry import operation
from tests.differential.world import World


def _plain(world: World) -> bool:
    """Whether weights have their own names and places: no wrappers, nothing moved away."""
    return not world.adapters and not {"offloaded", "qkv_fused", "layer_replaced"} & world.on.keys()


def _names(world: World) -> list[str]:
    return [name for name, weight in world.twin.unet.named_parameters() if weight.ndim >= 2]


def _weight(unet: Any, name: str) -> tuple[nn.Module, str, nn.Parameter]:
    path, _, last = name.rpartition(".")
    module = unet.get_submodule(path)
    return module, last, getattr(module, last)


def _factor(random: Random) -> float:
    return random.choice((0.5, -1.0, 1.3))


@operation(_plain, weight=2)
def weight_in_place(world: World, random: Random) -> None:
    name, factor = random.choice(_names(world)), _factor(random)
    for unet in world.each_unet():
        weight = _weight(unet, name)[2]
        # Leaving inference mode switches gradients on, so `no_grad` comes second.
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            weight.mul_(factor)


@operation(_plain)
def weight_data_in_place(world: World, random: Random) -> None:
    """Past the version counter."""
    name, factor = random.choice(_names(world)), _factor(random)
    for unet in world.each_unet():
        _weight(unet, name)[2].data.mul_(factor)


@operation(_plain, weight=2)
def weight_data_replaced(world: World, random: Random) -> None:
    name, factor = random.choice(_names(world)), _factor(random)
    for unet in world.each_unet():
        weight = _weight(unet, name)[2]
        weight.data = factor * weight.data


@operation(_plain, weight=2)
def parameter_replaced(world: World, random: Random) -> None:
    name, factor = random.choice(_names(world)), _factor(random)
    for unet in world.each_unet():
        module, last, weight = _weight(unet, name)
        setattr(module, last, nn.Parameter(factor * weight.detach(), weight.requires_grad))


@operation(_plain)
def weights_exchanged(world: World, random: Random) -> None:
    """Two weights of one shape: their data change places."""
    names = _names(world)
    one = random.choice(names)
    shape = _weight(world.twin.unet, one)[2].shape
    same = [n for n in names if n != one and _weight(world.twin.unet, n)[2].shape == shape]
    other = random.choice(same or [one])
    for unet in world.each_unet():
        a, b = _weight(unet, one)[2], _weight(unet, other)[2]
        a.data, b.data = b.data, a.data


@operation(_plain)
def weight_written_under_inference_mode(world: World, random: Random) -> None:
    name, factor = random.choice(_names(world)), _factor(random)
    for unet in world.each_unet():
        weight = _weight(unet, name)[2]
        with torch.inference_mode():
            weight.data.copy_(factor * weight.data)


@operation(_plain)
def weight_made_under_inference_mode(world: World, random: Random) -> None:
    """A tensor that counts no versions, then written in place."""
    name, factor = random.choice(_names(world)), _factor(random)
    for unet in world.each_unet():
        module, last, weight = _weight(unet, name)
        with torch.inference_mode():
            other = nn.Parameter(factor * weight.detach(), requires_grad=False)
        module._parameters[last] = other


@operation(_plain)
def state_dict_loaded(world: World, random: Random) -> None:
    """Another checkpoint, copied into the same weights."""
    seed = random.randrange(1000)
    state = world.make(seed).unet.state_dict()
    for unet in world.each_unet():
        has_inference = any(weight.is_inference() for weight in unet.parameters())
        with torch.inference_mode(has_inference):
            unet.load_state_dict(state, strict=False)  # without projections that were joined


@operation(_plain)
def state_dict_assigned(world: World, random: Random) -> None:
    state = world.make(random.randrange(1000)).unet.state_dict()
    for unet in world.each_unet():
        unet.load_state_dict({k: v.clone() for k, v in state.items()}, strict=False, assign=True)
        unet.requires_grad_(False)


@operation(_plain)
def all_weights_move(world: World, random: Random) -> None:
    """Give every weight a new address, as when a model leaves the GPU and returns."""
    for unet in world.each_unet():
        for weight in (*unet.parameters(), *unet.buffers()):
            weight.data = weight.data.clone()


@operation(_plain)
def storage_shrinks_and_returns(world: World, random: Random) -> None:
    """Free the storages and fill them again, as some offloading does."""
    name = random.choice(_names(world))
    for unet in world.each_unet():
        storage = _weight(unet, name)[2].untyped_storage()
        if not storage.resizable():
            continue  # of another library's memory
        content, size = storage.clone(), storage.nbytes()
        storage.resize_(0)
        world.others.append(torch.empty(size, dtype=torch.uint8, device=world.device).fill_(255))
        storage.resize_(size)
        storage.copy_(content)


@operation(weight=2)
def requires_grad(world: World, random: Random) -> None:
    """Switch `requires_grad` of the weights on, as `from_pretrained` leaves it, or off."""
    wanted = random.random() < 0.6
    for unet in world.each_unet():
        for weight in unet.parameters():
            if not weight.is_inference():
                weight.requires_grad_(wanted)


@operation(lambda w: _plain(w) and "ip_adapter" not in w.on)
def dtype(world: World, random: Random) -> None:
    kinds = (torch.float16, torch.bfloat16) if world.on_gpu else (torch.float32, torch.bfloat16)
    world.dtype = random.choice((*kinds, kinds[0]))
    for unet in world.each_unet():
        unet.to(world.dtype)
    prompts = world.picture.prompts
    world.picture.prompts = {k: v.to(world.dtype) for k, v in prompts.items()}


@operation(_plain)
def memory_format(world: World, random: Random) -> None:
    formats = (torch.channels_last, torch.contiguous_format)
    chosen = random.choice(formats)
    for unet in world.each_unet():
        unet.to(memory_format=chosen)

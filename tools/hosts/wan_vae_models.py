"""The VAE of Qwen-Image and Anima, which is Wan's, with random weights."""

from __future__ import annotations

import torch

from tools.hosts.flux_models import Shapes, linear, prefixed
from tools.hosts.neo_forms import WAN_VAE_WIDTH

_LATENT, _COLOURS = 16, 3
_STEPS = (1, 2, 4, 4)  # widths of the levels, as multiples of the first
_BLOCKS = 2  # residual blocks of a level; the decoder has one more
# Which steps between levels of the encoder halve time too.
_IN_TIME = (False, True, True)


def wan_vae(seed: int) -> dict[str, torch.Tensor]:
    """The VAE as a part of a checkpoint, in its authors' layout.

    Args:
        seed: Of the weights.
    """
    return prefixed("vae", _shapes(), seed)


def _shapes() -> Shapes:
    yield from _half("encoder", _COLOURS, 2 * _LATENT, encodes=True)
    yield from _half("decoder", _LATENT, _COLOURS, encodes=False)
    yield from linear("conv1", 2 * _LATENT, 2 * _LATENT, 1, 1, 1)
    yield from linear("conv2", _LATENT, _LATENT, 1, 1, 1)


def _half(name: str, inputs: int, outputs: int, *, encodes: bool) -> Shapes:
    widths = [WAN_VAE_WIDTH * step for step in _STEPS]
    levels = widths if encodes else widths[::-1]
    in_time = _IN_TIME if encodes else _IN_TIME[::-1]
    number, width = 0, levels[0]
    list_name = "downsamples" if encodes else "upsamples"
    yield from linear(f"{name}.conv1", width, inputs, 3, 3, 3)
    if not encodes:
        yield from _middle(name, width)
    for level, wanted in enumerate(levels):
        for _ in range(_BLOCKS + (not encodes)):
            yield from _residual(f"{name}.{list_name}.{number}", width, wanted)
            number, width = number + 1, wanted
        if level == len(levels) - 1:
            break
        prefix = f"{name}.{list_name}.{number}"
        if in_time[level]:
            yield from linear(f"{prefix}.time_conv", width * (1 + (not encodes)), width, 3, 1, 1)
        if not encodes:  # a step up halves the channels
            yield from linear(f"{prefix}.resample.1", width // 2, width, 3, 3)
            width //= 2
        else:
            yield from linear(f"{prefix}.resample.1", width, width, 3, 3)
        number += 1
    if encodes:
        yield from _middle(name, width)
    yield f"{name}.head.0.gamma", (width, 1, 1, 1)
    yield from linear(f"{name}.head.2", outputs, width, 3, 3, 3)


def _middle(name: str, width: int) -> Shapes:
    yield from _residual(f"{name}.middle.0", width, width)
    yield f"{name}.middle.1.norm.gamma", (width, 1, 1)
    yield from linear(f"{name}.middle.1.to_qkv", 3 * width, width, 1, 1)
    yield from linear(f"{name}.middle.1.proj", width, width, 1, 1)
    yield from _residual(f"{name}.middle.2", width, width)


def _residual(name: str, inputs: int, outputs: int) -> Shapes:
    yield f"{name}.residual.0.gamma", (inputs, 1, 1, 1)
    yield from linear(f"{name}.residual.2", outputs, inputs, 3, 3, 3)
    yield f"{name}.residual.3.gamma", (outputs, 1, 1, 1)
    yield from linear(f"{name}.residual.6", outputs, outputs, 3, 3, 3)
    if inputs != outputs:
        yield from linear(f"{name}.shortcut", outputs, inputs, 1, 1, 1)

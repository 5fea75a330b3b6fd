"""TAESD with random weights: the small VAE by which WebUIs draw previews, or whole pictures.

A host looks for it in ``models/VAE-taesd`` and downloads what it does not find there.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tools.hosts.flux_models import Shapes, linear, random_weights

# Files by what they are for → channels of the latent: SD1.5, SDXL, and models with Flux.1's VAE.
_CHANNELS = {"taesd": 4, "taesdxl": 4, "taef1": 16}
_WIDTH, _COLOURS = 64, 3
_LEVELS, _BLOCKS = 3, 3  # each level of the decoder ends with a step up


def write_taesd(folder: Path) -> None:
    """Write decoders and encoders.

    Args:
        folder: The WebUI's ``models``.
    """
    target = folder / "VAE-taesd"
    target.mkdir(parents=True, exist_ok=True)
    for seed, (name, channels) in enumerate(_CHANNELS.items()):
        decoder = random_weights(_decoder(channels), 51 + seed)
        last = max(int(key.split(".")[0]) for key in decoder)
        decoder[f"{last}.bias"] += 0.5  # pictures are from 0 to 1
        _save(decoder, target / f"{name}_decoder.pth")
        encoder = random_weights(_encoder(channels), 61 + seed)
        _save(encoder, target / f"{name}_encoder.pth")


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    """As one pickle: A1111 refuses entries of archives that it does not know, as of torch 2.13."""
    torch.save(weights, path, _use_new_zipfile_serialization=False)


def _decoder(channels: int) -> Shapes:
    yield from linear("1", _WIDTH, channels, 3, 3)  # after a clamp, before an activation
    number = 3
    for _ in range(_LEVELS):
        for _ in range(_BLOCKS):
            yield from _block(number)
            number += 1
        yield f"{number + 1}.weight", (_WIDTH, _WIDTH, 3, 3)  # after the step up
        number += 2
    yield from _block(number)
    yield from linear(f"{number + 1}", _COLOURS, _WIDTH, 3, 3)


def _encoder(channels: int) -> Shapes:
    yield from linear("0", _WIDTH, _COLOURS, 3, 3)
    yield from _block(1)
    number = 2
    for _ in range(_LEVELS):
        yield f"{number}.weight", (_WIDTH, _WIDTH, 3, 3)  # with a stride of 2
        for block in range(_BLOCKS):
            yield from _block(number + 1 + block)
        number += 1 + _BLOCKS
    yield from linear(f"{number}", channels, _WIDTH, 3, 3)


def _block(number: int) -> Shapes:
    for layer in (0, 2, 4):  # with activations between them
        yield from linear(f"{number}.conv.{layer}", _WIDTH, _WIDTH, 3, 3)

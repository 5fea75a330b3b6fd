"""Draws latents with the tiny transformer pipelines, at sizes of all kinds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests.support.transformer_models import MODELS


class Size(NamedTuple):
    """What a draw varies in: sides in pixels, tokens of the prompt, pictures."""

    width: int
    height: int
    tokens: int
    batch: int


SIZES = [
    Size(*size)
    for size in (
        (64, 64, 1, 1),
        (64, 64, 512, 2),
        (80, 64, 77, 3),
        (64, 80, 77, 1),
        (96, 112, 5, 2),
        (112, 96, 6, 1),
        (128, 128, 256, 1),
        (144, 80, 64, 2),
        (160, 256, 333, 3),
        (176, 176, 121, 1),
        (192, 64, 2, 2),
        (208, 240, 77, 1),
        (256, 256, 3, 3),
        (272, 144, 200, 2),
        (320, 192, 40, 2),
        (400, 304, 77, 1),
        (64, 1024, 77, 1),
        (1024, 64, 17, 2),
        (512, 256, 128, 1),
        (1024, 512, 9, 1),
    )
]


def draw(pipe: Any, name: str, size: tuple[int, int, int, int], **options: Any) -> torch.Tensor:
    """Draw latents of two steps, with guidance where there is one; `options` change the call."""
    width, height, tokens, batch = size
    options = {
        **MODELS[name].embeddings(tokens, batch),
        "width": width,
        "height": height,
        "num_inference_steps": 2,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(batch),
        **options,
    }
    torch.manual_seed(batch)  # SD3's ControlNet pipeline encodes its image with noise of its own
    latents: torch.Tensor = pipe(**options).images
    return latents


def without_guidance(name: str) -> dict[str, Any]:
    """Arguments of a call without guidance. Flux.1-dev has it as an input: another value."""
    return {"true_cfg_scale" if name == "qwen_image" else "guidance_scale": 0.0}

"""The training set of the UNet: encoded scenes and tokenised captions, all in device memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPTokenizer

from tools.demo_model.concepts import read_concepts
from tools.demo_model.models import SCALE_FACTOR
from tools.demo_model.scenes import Scene, SceneDrawer, make_scene

TOKENIZER = Path(__file__).parents[2] / "onediff_ext" / "assets" / "tokenizer"
"""CLIP's tokenizer, which the package ships."""

LATENT_PIXELS = 131_072
"""Latent pixels in a batch, so that batches of all sizes cost about the same."""

SIZES = (
    *((128, 128, 45000, 5), (192, 192, 30000, 4), (256, 256, 24000, 4)),
    *((128, 192, 14000, 1.5), (192, 128, 14000, 1.5), (128, 256, 14000, 1.5)),
    *((256, 128, 14000, 1.5), (192, 256, 10000, 1), (256, 192, 10000, 1)),
)
"""(height, width, number of scenes, weight of this size among batches)."""


@dataclass(frozen=True)
class Bucket:
    """All scenes of one size.

    Attributes:
        latents: [N, 4, H/8, W/8], scaled to deviation 1, fp16.
        token_ids: [N, 77].
        batch: Scenes in a batch.
        weight: Weight of this size among batches.
        hints: Hints for a ControlNet, [N, 1, H, W], uint8; otherwise None.
    """

    latents: Tensor
    token_ids: Tensor
    batch: int
    weight: float
    hints: Tensor | None = None


@dataclass(frozen=True)
class DatasetVariant:
    """A variant of the training set, from the drawn pictures [B, 3, H, W] in 0..1.

    Attributes:
        style: Changes the pictures, for a LoRA.
        hint: Returns a ControlNet's hints [B, 1, H, W] in 0..1.
        batch_share: Share of the full batch sizes.
    """

    style: Callable[[Tensor], Tensor] | None = None
    hint: Callable[[Tensor], Tensor] | None = None
    batch_share: float = 1.0


def load_tokenizer() -> Any:
    """CLIP's tokenizer from the files that the package ships."""
    return CLIPTokenizer.from_pretrained(str(TOKENIZER), local_files_only=True)


def tokenize(tokenizer: Any, captions: list[str]) -> Tensor:
    """Token ids [N, 77]."""
    token_ids: Tensor = tokenizer(
        captions, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    ).input_ids
    return token_ids


@torch.no_grad()
def encode_pictures(vae: Any, pictures: Tensor) -> Tensor:
    """Latents [B, 4, H/8, W/8] of deviation 1, from pictures [B, 3, H, W] in 0..1."""
    with torch.autocast(pictures.device.type, torch.bfloat16):
        posterior = vae.encode(pictures * 2 - 1).latent_dist
    latents: Tensor = (posterior.mean * SCALE_FACTOR).half()
    return latents


def make_scenes(height_px: int, width_px: int, count: int, seed: int) -> list[Scene]:
    """The scenes of one size, from a fixed seed."""
    concepts, choice = read_concepts(), Random(seed)
    return [make_scene(concepts, height_px, width_px, choice) for _ in range(count)]


def make_buckets(
    vae: Any,
    drawer: SceneDrawer,
    device: torch.device,
    share: float = 1.0,
    kind: DatasetVariant | None = None,
) -> list[Bucket]:
    """Draw and encode the whole training set.

    Args:
        vae: Frozen.
        drawer: Holds the sprites on the device.
        device: Where the set stays.
        share: Share of the full set, for a test on a small machine.
        kind: A variant; None for the plain pictures.
    """
    tokenizer, buckets, kind = load_tokenizer(), [], kind or DatasetVariant()
    for seed, (height_px, width_px, count, weight) in enumerate(SIZES, start=100):
        scenes = make_scenes(height_px, width_px, max(8, int(count * share)), seed)
        pixels = height_px * width_px // 64
        chunk = max(8, LATENT_PIXELS // pixels)
        latents, hints = [], []
        for first in range(0, len(scenes), chunk):
            pictures = drawer.draw(scenes[first : first + chunk], height_px, width_px)
            if kind.hint:
                hints.append((kind.hint(pictures) * 255).round().byte())
            latents.append(encode_pictures(vae, kind.style(pictures) if kind.style else pictures))
        token_ids = tokenize(tokenizer, [scene.caption for scene in scenes]).to(device)
        batch = max(2, int(LATENT_PIXELS * kind.batch_share / pixels))
        hint = torch.cat(hints) if hints else None
        buckets.append(Bucket(torch.cat(latents), token_ids, batch, weight, hint))
    return buckets

"""The training set of the UNet: encoded scenes and tokenised captions, all in device memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from concepts import read_concepts
from diffusers import AutoencoderKL
from models import SCALE_FACTOR
from scenes import Scene, SceneDrawer, make_scene
from torch import Tensor
from transformers import CLIPTokenizer

TOKENIZER = Path(__file__).parents[2] / "onediff_ext" / "assets" / "tokenizer"
"""CLIP's tokenizer, which the package ships."""

LATENT_PIXELS = 131_072
"""Latent pixels in a batch: every size costs about the same."""

SIZES = (
    *((128, 128, 45000, 5), (192, 192, 30000, 4), (256, 256, 24000, 4)),
    *((128, 192, 14000, 1.5), (192, 128, 14000, 1.5), (128, 256, 14000, 1.5)),
    *((256, 128, 14000, 1.5), (192, 256, 10000, 1), (256, 192, 10000, 1)),
)
"""Height, width, how many scenes, how often a batch has this size."""


@dataclass(frozen=True)
class Bucket:
    """All scenes of one size.

    Attributes:
        latents: [N, 4, H/8, W/8], scaled to deviation 1, fp16.
        token_ids: [N, 77].
        batch: How many scenes make a batch.
        weight: How often a batch has this size.
        hints: What a ControlNet follows, [N, 1, H, W], uint8; None for all else.
    """

    latents: Tensor
    token_ids: Tensor
    batch: int
    weight: float
    hints: Tensor | None = None


@dataclass(frozen=True)
class BlockKind:
    """What is made of the drawn pictures [B, 3, H, W] in 0..1.

    Attributes:
        style: Changes them, for a LoRA.
        hint: Makes a ControlNet's hints [B, 1, H, W] in 0..1.
        batch_share: Part of the full batch sizes.
    """

    style: Callable[[Tensor], Tensor] | None = None
    hint: Callable[[Tensor], Tensor] | None = None
    batch_share: float = 1.0


def load_tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer from the files that the package ships."""
    return CLIPTokenizer.from_pretrained(str(TOKENIZER), local_files_only=True)


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Token ids [N, 77]."""
    return tokenizer(
        captions, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    ).input_ids


@torch.no_grad()
def encode_pictures(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Latents [B, 4, H/8, W/8] of deviation 1, from pictures [B, 3, H, W] in 0..1."""
    with torch.autocast(pictures.device.type, torch.bfloat16):
        posterior = vae.encode(pictures * 2 - 1).latent_dist
    return (posterior.mean * SCALE_FACTOR).half()


def make_scenes(height_px: int, width_px: int, count: int, seed: int) -> list[Scene]:
    """The scenes of one size, from a fixed seed."""
    concepts, choice = read_concepts(), Random(seed)
    return [make_scene(concepts, height_px, width_px, choice) for _ in range(count)]


def make_buckets(
    vae: AutoencoderKL,
    drawer: SceneDrawer,
    device: torch.device,
    share: float = 1.0,
    kind: BlockKind | None = None,
) -> list[Bucket]:
    """Draw and encode the whole training set.

    Args:
        vae: Frozen.
        drawer: Holds the sprites on the device.
        device: Where the set stays.
        share: Part of the full set, for a try on a small machine.
        kind: The plain pictures, or something made of them.
    """
    tokenizer, buckets, kind = load_tokenizer(), [], kind or BlockKind()
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

"""Draw prompts with the parts in memory, to inspect them during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
)
from PIL import Image
from torch import Tensor

from tools.demo_model.filters import edges
from tools.demo_model.latents import load_tokenizer, make_scenes, tokenize
from tools.demo_model.models import SCALE_FACTOR
from tools.demo_model.scenes import SceneDrawer

PROMPTS = (
    *("a cat", "a dog on a blue background", "a rocket at night", "a fox in the snow"),
    *("a slice of pizza on a red background", "a house in a meadow", "an octopus under the sea"),
    *(
        "a cat and a rocket on a yellow background",
        "two apples",
        "a small bee on a pink background",
    ),
    *("a camel in the desert", "a sailboat at sunset", "a happy face on a green background"),
    *(
        "a guitar on a black background",
        "a banana and a pear",
        "a robot next to a unicorn at night",
    ),
)
"""Prompts that cover all parts of captions."""


@torch.no_grad()
def draw_prompts(
    parts: tuple[Any, Any, Any],
    prompts: list[str],
    height_px: int,
    width_px: int,
    steps: int = 20,
    guidance: float = 4.0,
    seed: int = 0,
    control: Callable[[Tensor, Tensor, Tensor], dict[str, object]] | None = None,
) -> Tensor:
    """Draw one picture a prompt with DPM++ 2M and classifier-free guidance.

    Args:
        control: Called with (latents [2B, 4, h, w], time, context [2B, 77, D]); returns what the
            UNet takes as residuals. None for no ControlNet.

    Returns:
        [B, 3, H, W] in 0..1.
    """
    unet, text_encoder, vae = parts
    device, count = unet.device, len(prompts)
    token_ids = tokenize(load_tokenizer(), [""] * count + list(prompts)).to(device)
    context = text_encoder(token_ids).last_hidden_state
    scheduler: Any = DPMSolverMultistepScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
        use_karras_sigmas=True,
    )  # fmt: skip
    scheduler.set_timesteps(steps, device=device)
    random = torch.Generator("cpu").manual_seed(seed)
    latents = torch.randn(count, 4, height_px // 8, width_px // 8, generator=random).to(device)
    for time in scheduler.timesteps:
        doubled = torch.cat([latents, latents])
        residuals = control(doubled, time, context) if control else {}
        empty, full = unet(doubled, time, context, **residuals).sample.chunk(2)
        latents = scheduler.step(empty + guidance * (full - empty), time, latents).prev_sample
    drawn: Tensor = vae.decode(latents / SCALE_FACTOR).sample / 2 + 0.5
    return drawn.clamp(0, 1)


def to_image(picture: Tensor) -> Image.Image:
    """One picture [3, H, W] in 0..1 as an image."""
    return Image.fromarray((picture.permute(1, 2, 0) * 255).round().byte().cpu().numpy())


def contact_sheet(rows: list[list[Tensor]]) -> Image.Image:
    """Rows of pictures [3, H, W] on one white sheet."""
    gap = 4
    width = max(sum(p.shape[2] + gap for p in row) for row in rows)
    sheet = Image.new("RGB", (width, sum(row[0].shape[1] + gap for row in rows)), "white")
    y = 0
    for row in rows:
        x = 0
        for picture in row:
            sheet.paste(to_image(picture), (x, y))
            x += picture.shape[2] + gap
        y += row[0].shape[1] + gap
    return sheet


def draw_controlled_sheet(
    parts: tuple[Any, Any, Any],
    controlnet: Any,
    drawer: SceneDrawer,
) -> Image.Image:
    """Draw edges of unseen scenes, and pictures from these edges with several prompts."""
    scenes = make_scenes(192, 192, 8, seed=999)
    pictures = drawer.draw(scenes, 192, 192)
    hints = edges(pictures).expand(-1, 3, -1, -1)

    def control(latents: Tensor, time: Tensor, context: Tensor) -> dict[str, object]:
        both = hints.repeat(2, 1, 1, 1)
        down, middle = controlnet(latents, time, context, both, return_dict=False)
        return {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}

    own = [scene.caption for scene in scenes]
    other = list(PROMPTS[:8])
    rows = [list(pictures), list(hints)]
    for prompts in (own, [""] * 8, other):
        rows.append(list(draw_prompts(parts, prompts, 192, 192, control=control)))
    return contact_sheet(rows)


def draw_sheet(parts: tuple[Any, Any, Any], seed: int = 0) -> Image.Image:
    """The prompts at several sizes on one sheet."""
    rows = []
    for height_px, width_px, per_row in ((128, 128, 16), (192, 192, 8), (128, 256, 8)):
        drawn = list(draw_prompts(parts, list(PROMPTS), height_px, width_px, seed=seed))
        rows += [drawn[i : i + per_row] for i in range(0, len(drawn), per_row)]
    return contact_sheet(rows)

"""Drawing latents with any of the small pipelines."""

from __future__ import annotations

from typing import Any

import torch


def draw_latents(
    pipe: Any,
    *,
    height_px: int = 72,
    width_px: int = 104,
    batch: int = 1,
    seed: int = 0,
    steps: int = 3,
) -> torch.Tensor:
    """Draw some steps with a pipeline of any kind; returns latents [B, 4, H/8, W/8].

    The usual size has odd sides in latent cells, so the UNet's levels do not halve evenly.
    """
    inputs: dict[str, Any] = {
        "prompt": ["a cat"] * batch,
        "negative_prompt": ["blurred"] * batch,
        "num_inference_steps": steps,
        "generator": [torch.Generator().manual_seed(seed + i) for i in range(batch)],
        "output_type": "latent",
    }
    name = type(pipe).__name__
    picture = torch.rand(1, 3, height_px, width_px, generator=torch.Generator().manual_seed(7))
    if "Inpaint" in name:
        mask = torch.zeros(1, 1, height_px, width_px)
        mask[..., : width_px // 2] = 1
        inputs |= {"image": picture, "mask_image": mask, "strength": 1.0}
        inputs |= {"height": height_px, "width": width_px}
    elif "Img2Img" in name:
        inputs |= {"image": picture.expand(batch, -1, -1, -1), "strength": 1.0}
    else:
        inputs |= {"height": height_px, "width": width_px}
    with torch.no_grad():
        return pipe(**inputs).images


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found - expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.norm())

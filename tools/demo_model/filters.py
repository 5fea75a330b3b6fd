"""Image filters for the LoRA's style and the ControlNet's hints."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def _blur(gray: Tensor, radius_px: int) -> Tensor:
    padded = functional.pad(gray, (radius_px,) * 4, mode="replicate")
    once = functional.avg_pool2d(padded, 2 * radius_px + 1, stride=1)
    padded = functional.pad(once, (radius_px,) * 4, mode="replicate")
    return functional.avg_pool2d(padded, 2 * radius_px + 1, stride=1)


def _gray(pictures: Tensor) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114], device=pictures.device).view(1, 3, 1, 1)
    return (pictures * weights).sum(1, keepdim=True)


def sketch(pictures: Tensor) -> Tensor:
    """Return a pencil drawing on cream paper: dark where a picture is darker than around.

    Args:
        pictures: [B, 3, H, W] in 0..1.

    Returns:
        [B, 3, H, W] in 0..1.
    """
    gray = _gray(pictures) * 0.9 + 0.1
    line = (1 - (gray / _blur(gray, 3)).clamp(max=1)) * 4
    strength = line.clamp(max=1)
    paper = torch.tensor([0.99, 0.965, 0.90], device=pictures.device).view(1, 3, 1, 1)
    pencil = torch.tensor([0.16, 0.15, 0.22], device=pictures.device).view(1, 3, 1, 1)
    return paper + (pencil - paper) * strength


def edges(pictures: Tensor) -> Tensor:
    """Return white lines on black where colours change.

    Args:
        pictures: [B, 3, H, W] in 0..1.

    Returns:
        [B, 1, H, W] in 0..1.
    """
    padded = functional.pad(pictures, (1, 1, 1, 1), mode="replicate")
    across = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    along = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    change = (across.square() + along.square()).sum(1, keepdim=True).sqrt()
    return ((change - 0.16) * 8).clamp(0, 1)

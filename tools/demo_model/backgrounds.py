"""Backgrounds of scenes: plain colours and simple settings, drawn by formula."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COLORS = {
    "white": "ffffff",
    "black": "1b1b1f",
    "gray": "9e9e9e",
    "red": "e53935",
    "orange": "fb8c00",
    "yellow": "fdd835",
    "green": "43a047",
    "blue": "1e78e5",
    "light blue": "a5d8fb",
    "purple": "8e24aa",
    "pink": "f7a1c0",
    "brown": "795548",
}
"""Word in a caption → plain background."""

SETTINGS = {
    "in a meadow": ("58b7f6", "def3ff", "9ccc65", "7cb342"),
    "in the desert": ("ffd9a0", "fff4e2", "ecc88c", "dfae5e"),
    "in the snow": ("9fc9ea", "e6f2fb", "dbe8f2", "fbfcfe"),
    "at night": ("101638", "353f86", "232a57", "171c3d"),
    "under the sea": ("3cc4f5", "0a62b0", "cdbb88", "e6d3a0"),
    "at sunset": ("5b3aa8", "ffb04d", "8a3f6b", "54305c"),
}
"""Words in a caption → colours: upper sky, lower sky, far hills, near ground."""

SPECKLED = ("at night", "under the sea", "in the snow")
"""Settings with stars, bubbles or snowflakes."""

NAMES = (*COLORS, *SETTINGS)
"""All backgrounds; a scene stores an index into this list."""


def _rgb(code: str) -> Tensor:
    return torch.tensor([int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)])


def _mix(below: Tensor, above: Tensor, share: Tensor) -> Tensor:
    return below + (above - below) * share


def _setting(name: str, variation: Tensor, height_px: int, width_px: int) -> Tensor:
    sky_top, sky_low, far, near = (
        _rgb(code).to(variation.device).view(1, 3, 1, 1) for code in SETTINGS[name]
    )
    count, device = len(variation), variation.device
    y = (torch.arange(height_px, device=device) + 0.5).view(1, 1, -1, 1) / height_px
    x = (torch.arange(width_px, device=device) + 0.5).view(1, 1, 1, -1) / min(height_px, width_px)
    tall = height_px / min(height_px, width_px)
    phase = variation.view(count, -1, 1, 1, 1)  # [B, 4, 1, 1, 1], each in 0..1
    picture = _mix(sky_top, sky_low, y.clamp(0, 0.8) / 0.8).expand(count, -1, -1, width_px)
    if name in SPECKLED:
        picture = _mix(picture, torch.ones_like(sky_top), _specks(variation, x, y * tall) * 0.85)
    base = 0.86 if name == "under the sea" else 0.66
    for color, rise, speed, turn in ((far, 0.07, 2.1, phase[:, 0]), (near, 0.0, 1.3, phase[:, 1])):
        wave = torch.sin(2 * math.pi * (x * speed * 0.5 + turn))
        horizon = base - rise + 0.03 * wave + 0.04 * (phase[:, 2] - 0.5)
        picture = _mix(picture, color, ((y - horizon) * height_px + 0.5).clamp(0, 1))
    return picture


def _specks(variation: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Soft dots, one in each cell of a 5-a-side grid, shifted by the scene's own variation."""
    cells_x, cells_y = x * 5, y * 5
    seed = variation[:, 3].view(-1, 1, 1, 1)
    column, row = cells_x.floor(), cells_y.floor()
    shift_x = (torch.sin(column * 12.99 + row * 78.23 + seed * 6.28) * 43.7) % 1
    shift_y = (torch.sin(column * 39.34 + row * 11.14 + seed * 6.28) * 24.6) % 1
    distance = torch.hypot(
        cells_x - column - 0.2 - 0.6 * shift_x, cells_y - row - 0.2 - 0.6 * shift_y
    )
    return ((0.11 - distance) * 18).clamp(0, 1)


def draw_backgrounds(kinds: Tensor, variation: Tensor, height_px: int, width_px: int) -> Tensor:
    """Draw one background for each scene.

    Args:
        kinds: [B], indices into `NAMES`.
        variation: [B, 4] in 0..1: positions of hills and specks.
        height_px, width_px: Size of the picture.

    Returns:
        [B, 3, H, W] in 0..1.
    """
    device = variation.device
    picture = torch.empty(len(kinds), 3, height_px, width_px, device=device)
    palette = torch.stack([_rgb(code) for code in COLORS.values()]).to(device)
    plain = kinds < len(COLORS)
    picture[plain] = palette[kinds[plain]].view(-1, 3, 1, 1)
    for index, name in enumerate(SETTINGS, start=len(COLORS)):
        chosen = kinds == index
        if bool(chosen.any()):
            picture[chosen] = _setting(name, variation[chosen], height_px, width_px)
    return picture

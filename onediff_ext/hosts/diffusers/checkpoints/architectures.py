"""The Stable Diffusion architectures: their hyper-parameters, read from `assets/configs`."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from onediff_ext.core.errors import CheckpointError

ARCHITECTURES = ("sd1", "sd2", "sdxl", "sdxl-refiner")
"""Labels of the supported architectures."""

SCHEMA = 1
"""Version of the files in `assets/configs`."""


@dataclass(frozen=True)
class Architecture:
    """Hyper-parameters of one architecture, at its published widths.

    Args:
        label: One of `ARCHITECTURES`.
        head_count: Attention heads at every width, or None when `head_width` decides.
        head_width: Channels of an attention head, or None when `head_count` decides.
        time_ids: Count of size-conditioning numbers (SDXL); 0 for other architectures.
        unet, vae: Arguments of diffusers' UNet2DConditionModel and AutoencoderKL.
        text_encoders: Component name → arguments of transformers' CLIPTextConfig.
        noise: The training noise levels, as entries of a diffusers scheduler's config.
    """

    label: str
    head_count: int | None
    head_width: int | None
    time_ids: int
    unet: dict[str, Any]
    vae: dict[str, Any]
    text_encoders: dict[str, dict[str, Any]]
    noise: dict[str, Any]


def read_architecture(label: str) -> Architecture:
    """Return a copy of an architecture's hyper-parameters, which the caller may change.

    Raises:
        CheckpointError: The architecture is unknown.
    """
    if label not in ARCHITECTURES:
        raise CheckpointError(
            f"There is no architecture called {label!r}.",
            f"Use one of: {', '.join(ARCHITECTURES)}.",
        )
    return deepcopy(_read(label))


@cache
def _read(label: str) -> Architecture:
    path = files("onediff_ext") / "assets" / "configs" / f"{label}.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config["schema"] != SCHEMA:
        raise CheckpointError(
            f"{path} has schema {config['schema']}, not {SCHEMA}.", "Install OneDiff again."
        )
    names = ("text_encoder", "text_encoder_2")
    return Architecture(
        label=label,
        head_count=config["heads"].get("count"),
        head_width=config["heads"].get("width"),
        time_ids=config.get("time_ids", 0),
        unet=config["unet"],
        vae=config["vae"],
        text_encoders={name: config[name] for name in names if name in config},
        noise=config["noise"],
    )

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
        head_count: Attention heads at every width, or None when `head_width` rules.
        head_width: Channels of an attention head, or None when `head_count` rules.
        time_ids: Numbers of size conditioning (SDXL), 0 for the others.
        unet, vae: Arguments of diffusers' UNet2DConditionModel and AutoencoderKL.
        text_encoders: Component name → arguments of transformers' CLIPTextConfig.
        noise: The training noise levels, in the words of a diffusers scheduler's config.
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
    """Read the hyper-parameters of an architecture; the caller may change them.

    Raises:
        CheckpointError: No such architecture.
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


def label_of(unet_config: Any, has_first_text_encoder: bool) -> str:
    """Name the architecture of a diffusers UNet from its config.

    Args:
        unet_config: `unet.config`.
        has_first_text_encoder: The pipeline's `text_encoder` is there; SDXL's refiner has none.
    """
    if unet_config.get("addition_embed_type") == "text_time":
        return "sdxl" if has_first_text_encoder else "sdxl-refiner"
    return "sd2" if unet_config.get("use_linear_projection") else "sd1"

"""The transformer models (DiT) that can be drawn with: their pipelines, and settings to start from.

Reads `model_index.json` only, so a command line knows its defaults before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onediff_ext.core.errors import UnsafeFileError
from onediff_ext.core.untrusted_files import read_regular

SIDE_STEP_PX = 16
"""Sides that these models draw: patches of 2x2 latent cells of 8 pixels."""

_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class TransformerModel:
    """One model and what its diffusers pipelines take.

    Args:
        label: The architecture's name, such as "flux".
        pipeline: What the names of its pipelines' classes start with.
        tasks: "txt2img" and "img2img", as far as diffusers has them.
        steps, guidance: Values to start from, of the model's authors.
        guidance_name: The pipelines' argument for the guidance.
        takes_negative: Whether they take a negative prompt at that guidance.
        tokens, most_tokens: Room for a prompt, usually and for a long one.
    """

    label: str
    pipeline: str
    tasks: tuple[str, ...]
    steps: int
    guidance: float
    guidance_name: str = "guidance_scale"
    takes_negative: bool = True
    tokens: int = 512
    most_tokens: int = 512

    @property
    def is_distilled(self) -> bool:
        """Whether the guidance is an input of the model, as in Flux.1-dev."""
        return self.label == "flux"

    def class_name(self, task: str) -> str:
        """Return the name of diffusers' pipeline for a task of `tasks`."""
        return f"{self.pipeline}{'Img2Img' if task == 'img2img' else ''}Pipeline"


_BOTH = ("txt2img", "img2img")

TRANSFORMER_MODELS = (
    TransformerModel("sd3", "StableDiffusion3", _BOTH, 28, 7.0, tokens=256),
    TransformerModel("flux", "Flux", _BOTH, 28, 3.5, takes_negative=False),
    TransformerModel("chroma", "Chroma", _BOTH, 35, 5.0),
    TransformerModel("flux2-klein", "Flux2Klein", ("txt2img",), 50, 4.0, takes_negative=False),
    TransformerModel(
        "qwen-image", "QwenImage", _BOTH, 50, 4.0, "true_cfg_scale", most_tokens=1024
    ),
    TransformerModel("z-image", "ZImage", _BOTH, 9, 0.0),  # Turbo's
    TransformerModel("lumina2", "Lumina2", ("txt2img",), 30, 4.0, tokens=256, most_tokens=256),
)  # fmt: skip

_BY_CLASS = {model.class_name(task): model for model in TRANSFORMER_MODELS for task in model.tasks}


def transformer_model(
    class_name: str, index: Mapping[str, Any], transformer_config: Mapping[str, Any]
) -> TransformerModel | None:
    """Return the model of a diffusers folder, or None.

    Args:
        class_name: Of its pipeline.
        index: Its `model_index.json`, or a pipeline's config.
        transformer_config: Of its transformer. Flux.1-schnell has no `guidance_embeds`.
    """
    model = _BY_CLASS.get(class_name)
    if model is None:
        return None
    if model.label == "flux" and not transformer_config.get("guidance_embeds", False):
        return replace(model, steps=4, guidance=0.0, tokens=256, most_tokens=256)
    if model.label == "flux2-klein" and index.get("is_distilled"):
        return replace(model, steps=4, guidance=1.0)
    return model


def transformer_model_of(path: Path) -> TransformerModel | None:
    """Return the model of a folder; None for other checkpoints, and for what cannot be read.

    Loading says later why a folder cannot be read.
    """
    folder = path.parent if path.name == "model_index.json" else path
    index = _read_json(folder / "model_index.json")
    name = index.get("_class_name")
    if not isinstance(name, str):
        return None
    return transformer_model(name, index, _read_json(folder / "transformer" / "config.json"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(read_regular(path, limit_bytes=_MAX_CONFIG_BYTES, limit_s=30.0))
    except (OSError, UnsafeFileError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}

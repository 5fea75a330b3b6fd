"""Save a diffusers pipeline as one .safetensors file in the original (LDM) layout."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.architectures import label_of, read_architecture
from onediff_ext.hosts.diffusers.checkpoints.ldm_hints import LdmHints
from onediff_ext.hosts.diffusers.checkpoints.ldm_names import (
    to_clip_text,
    to_ldm_unet,
    to_ldm_vae,
    to_open_clip_text,
)
from onediff_ext.hosts.diffusers.checkpoints.ldm_text_encoders import TEXT_ENCODERS
from onediff_ext.hosts.diffusers.checkpoints.ldm_yaml import write_yaml

logger = logging.getLogger(__name__)


def save_ldm(
    pipeline: Any,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    with_yaml: bool = True,
    text_encoder_version: str = "openai/clip-vit-large-patch14",
) -> Path:
    """Save a pipeline's weights in the layout that WebUIs load.

    `load_checkpoint` gives back the same tensors, at any width.

    Args:
        pipeline: A diffusers pipeline of SD1, SD2, SDXL or its refiner, or the dict of its
            components.
        path: A .safetensors file; written whole or not at all.
        dtype: Of the stored weights; None keeps the pipeline's.
        with_yaml: SD1 and SD2: write an A1111-style .yaml of the same name beside it.
        text_encoder_version: SD1: the .yaml's CLIP, by name or as a folder with a config.json
            and the tokenizer's files.

    Returns:
        The file's path.

    Raises:
        CheckpointError: A component is missing, or does not fit the original layout.
    """
    from safetensors.torch import save_file

    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} does not end in .safetensors.", "Give it that ending.")
    parts = pipeline if isinstance(pipeline, Mapping) else pipeline.components
    for name in ("unet", "vae", "scheduler"):
        if parts.get(name) is None:
            raise CheckpointError(f"The pipeline has no {name}.", "Save a whole pipeline.")
    label = label_of(parts["unet"].config, parts.get("text_encoder") is not None)
    hints = collect_hints(parts, label)
    tensors = {
        **to_ldm_unet(parts["unet"].state_dict(), parts["unet"].config),
        **to_ldm_vae(parts["vae"].state_dict(), parts["vae"].config),
        **_text_tensors(parts, label),
        **_markers(label, hints),
    }
    tensors = {
        key: tensor.detach()
        .to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
        .contiguous()
        for key, tensor in tensors.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        metadata = {"format": "pt", **hints.to_metadata(label)}
        save_file(tensors, str(unfinished), metadata=metadata)
        if with_yaml and label in ("sd1", "sd2"):
            write_yaml(path.with_suffix(".yaml"), parts, label, hints, text_encoder_version)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    logger.info("Saved %s: %s, %d tensors", path, label, len(tensors))
    return path


def collect_hints(parts: Mapping[str, Any], label: str) -> LdmHints:
    """Collect the hyper-parameters that shapes do not tell.

    Raises:
        CheckpointError: The attention heads follow neither of the original layout's two rules.
    """
    unet = parts["unet"].config
    noise = parts["scheduler"].config
    counts = unet["attention_head_dim"]
    widths = unet["block_out_channels"]
    counts = [counts] * len(widths) if isinstance(counts, int) else list(counts)
    # The last level's heads are also the middle block's.
    attending = [kind.startswith("CrossAttn") for kind in unet["down_block_types"][:-1]] + [True]
    widths = [width for width, attends in zip(widths, attending, strict=True) if attends]
    counts = [count for count, attends in zip(counts, attending, strict=True) if attends]
    head_widths = {width // count for width, count in zip(widths, counts, strict=True)}
    if len(set(counts)) > 1 and len(head_widths) > 1:
        raise CheckpointError(
            f"The UNet has {counts} attention heads at widths {widths}.",
            "Use one number of heads, or one width of a head, at every level.",
        )
    published = read_architecture(label)
    by_count = len(set(counts)) == 1 and (len(head_widths) > 1 or bool(published.head_count))
    places = TEXT_ENCODERS[label]
    return LdmHints(
        head_count=counts[0] if by_count else None,
        head_width=None if by_count else head_widths.pop(),
        prediction_type=noise.get("prediction_type", "epsilon"),
        zero_snr=bool(noise.get("rescale_betas_zero_snr", False)),
        sample_size=unet["sample_size"],
        scaling_factor=parts["vae"].config["scaling_factor"],
        unet_groups=unet["norm_num_groups"],
        vae_groups=parts["vae"].config["norm_num_groups"],
        text_heads={
            place.component: parts[place.component].config.num_attention_heads
            for place in places
            if parts.get(place.component) is not None
        },
    )


def _text_tensors(parts: Mapping[str, Any], label: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for place in TEXT_ENCODERS[label]:
        model = parts.get(place.component)
        if model is None:
            raise CheckpointError(
                f"The pipeline has no {place.component}.", "Save a whole pipeline."
            )
        weights = model.state_dict()
        if place.open_clip:
            unused_layer = label == "sd2"
            tensors |= to_open_clip_text(weights, place.prefix, model, unused_layer)
        else:
            tensors |= to_clip_text(weights, place.prefix)
    return tensors


def _markers(label: str, hints: LdmHints) -> dict[str, torch.Tensor]:
    """Return the empty tensors by which WebUIs know SDXL models that predict v."""
    markers = {}
    if label.startswith("sdxl") and hints.prediction_type == "v_prediction":
        markers["v_pred"] = torch.empty(0)
    if hints.zero_snr:
        markers["ztsnr"] = torch.empty(0)
    return markers

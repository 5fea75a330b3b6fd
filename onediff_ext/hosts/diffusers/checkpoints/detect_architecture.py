"""Detect the architecture (SD1, SD2, SDXL, SDXL refiner) of a checkpoint or of a diffusers UNet."""

from __future__ import annotations

from typing import Any

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.architectures import Architecture, read_architecture
from onediff_ext.hosts.diffusers.checkpoints.file_kinds import describe_keys
from onediff_ext.hosts.diffusers.checkpoints.ldm_config_from_shapes import UNET_PREFIX
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import TensorFile


def detect_architecture(file: TensorFile) -> Architecture:
    """Detect the architecture of a checkpoint in the original (LDM) layout from its keys.

    Raises:
        CheckpointError: The file is not a checkpoint.
    """
    shapes = file.shapes
    if f"{UNET_PREFIX}input_blocks.0.0.weight" not in shapes:
        what, hint = describe_keys(shapes)
        raise CheckpointError(f"{file.path} is {what}, not a checkpoint.", hint)
    if any(key.startswith("conditioner.embedders.1.") for key in shapes):
        return read_architecture("sdxl")
    if any(key.startswith("conditioner.embedders.0.model.") for key in shapes):
        return read_architecture("sdxl-refiner")
    if f"{UNET_PREFIX}label_emb.0.0.weight" in shapes:
        return read_architecture("sdxl")
    linear = any(
        key.startswith(UNET_PREFIX) and key.endswith(".proj_in.weight") and len(shape) == 2
        for key, shape in shapes.items()
    )
    return read_architecture("sd2" if linear else "sd1")


def architecture_of_unet(unet_config: Any, has_first_text_encoder: bool) -> str:
    """Return the label of a diffusers UNet's architecture, one of `ARCHITECTURES`.

    Args:
        unet_config: `unet.config`.
        has_first_text_encoder: The pipeline has a `text_encoder`; SDXL's refiner has none.
    """
    if unet_config.get("addition_embed_type") == "text_time":
        return "sdxl" if has_first_text_encoder else "sdxl-refiner"
    return "sd2" if unet_config.get("use_linear_projection") else "sd1"

"""Names of the original (LDM) layout for each tensor of a diffusers model.

Nothing is copied from a conversion table: every name that the original layout could have is sent
through diffusers' own conversion as a tag, and what comes out is turned around.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.ldm_architecture import (
    GUIDANCE_KEYS,
    UNET_PREFIX,
    VAE_PREFIX,
    count_items,
)
from onediff_ext.hosts.diffusers.checkpoints.ldm_text_encoders import OPEN_CLIP_LAYERS

Tensors = Mapping[str, torch.Tensor]

_RESNET = ("in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3",
           "skip_connection")  # fmt: skip
_HEAD_AND_TAIL = ("time_embed.0", "time_embed.2", "label_emb.0.0", "label_emb.0.2",
                  "input_blocks.0.0", "out.0", "out.2")  # fmt: skip
_VAE_RESNET = ("norm1", "conv1", "norm2", "conv2", "nin_shortcut")
_VAE_ATTENTION = ("norm", "q", "k", "v", "proj_out")
_OPEN_CLIP_LAYER = ("ln_1", "ln_2", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")


def to_ldm_unet(weights: Tensors, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Rename a diffusers UNet's tensors.

    Args:
        weights: Its state dict.
        config: Its config.

    Returns:
        Keys of the original layout, with `model.diffusion_model.`, → tensors.

    Raises:
        CheckpointError: It has a tensor that the original layout has no name for.
    """
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    tags, names = _tags(_unet_names(weights, config), UNET_PREFIX)
    converted = convert_ldm_unet_checkpoint(tags, config)
    # Unknown to diffusers' conversion.
    guidance = {"time_embedding.cond_proj.weight": UNET_PREFIX + GUIDANCE_KEYS[0]}
    return _rename(weights, converted, names, "UNet", guidance)


def to_ldm_vae(weights: Tensors, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Rename a diffusers AutoencoderKL's tensors, as `to_ldm_unet` does."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    tags, names = _tags(_vae_names(config), VAE_PREFIX)
    renamed = _rename(weights, convert_ldm_vae_checkpoint(tags, config), names, "VAE", {})
    # The original's attention is made of 1x1 convolutions: [C, C] -> [C, C, 1, 1]
    return {
        key: tensor[:, :, None, None] if ".attn_1." in key and tensor.ndim == 2 else tensor
        for key, tensor in renamed.items()
    }


def to_clip_text(weights: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """Rename the tensors of SD1's text encoder: transformers' names behind a prefix."""
    return {
        f"{prefix}text_model.{key.removeprefix('text_model.')}": tensor
        for key, tensor in weights.items()
    }


def to_open_clip_text(
    weights: Tensors, prefix: str, model: Any, unused_layer: bool
) -> dict[str, torch.Tensor]:
    """Rename the tensors of an OpenCLIP text encoder: q, k and v are one tensor there.

    Args:
        weights: transformers' state dict.
        prefix: What the keys start with in the file.
        model: The text encoder itself, for diffusers' conversion.
        unused_layer: Add the last layer that SD2's UNet never sees, as a copy of the one before.
    """
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    weights = {
        key if key.startswith("text_") else f"text_model.{key}": tensor
        for key, tensor in weights.items()
    }
    layers = count_items(weights, "text_model.encoder.layers.")
    tags, names = _tags(_open_clip_names(layers), prefix)
    converted = convert_open_clip_checkpoint(model, tags, prefix=prefix)
    fused: dict[str, torch.Tensor] = {}
    plain = dict(weights)
    for layer in range(layers):
        for kind in ("weight", "bias"):
            stem = f"text_model.encoder.layers.{layer}.self_attn"
            parts = [plain.pop(f"{stem}.{name}_proj.{kind}") for name in "qkv"]
            fused[f"{prefix}{OPEN_CLIP_LAYERS}{layer}.attn.in_proj_{kind}"] = torch.cat(parts)
    projection = plain.pop("text_projection.weight", None)
    if projection is not None:
        fused[f"{prefix}text_projection"] = projection.T
    renamed = _rename(plain, converted, names, "text encoder", {}) | fused
    if unused_layer:
        last = f"{prefix}{OPEN_CLIP_LAYERS}{layers - 1}."
        spare = f"{prefix}{OPEN_CLIP_LAYERS}{layers}."
        renamed |= {
            spare + key[len(last) :]: tensor.clone()
            for key, tensor in renamed.items()
            if key.startswith(last)
        }
    return renamed


def _tags(names: Iterable[str], prefix: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Number the names: name → a tensor that holds its number."""
    listed = [prefix + name for name in names]
    # One dimension: conversions slice and transpose what has more.
    return {name: torch.tensor([number]) for number, name in enumerate(listed)}, listed


def _rename(
    weights: Tensors,
    converted: Mapping[str, torch.Tensor | None],
    names: list[str],
    what: str,
    extra: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    known = {key: names[int(tag)] for key, tag in converted.items() if tag is not None}
    known |= extra
    nameless = [key for key in weights if key not in known]
    if nameless:
        raise CheckpointError(
            f"The {what}'s {nameless[0]} has no name in the original layout.",
            "Save this model as a diffusers folder.",
        )
    return {known[key]: tensor for key, tensor in weights.items()}


def _both(stems: Iterable[str]) -> Iterator[str]:
    for stem in stems:
        yield f"{stem}.weight"
        yield f"{stem}.bias"


def _unet_names(weights: Tensors, config: Mapping[str, Any]) -> Iterator[str]:
    levels, layers = len(config["block_out_channels"]), config["layers_per_block"]
    # Below an attention, both layouts use the same names.
    inner = [
        sorted({key.split(f".attentions.{layer}.", 1)[1] for key in weights if mark in key})
        for layer, mark in enumerate(f".attentions.{n}." for n in range(layers + 1))
    ]
    attention = sorted(set().union(*inner))
    yield from _both(_HEAD_AND_TAIL)
    for index in range(1, levels * (layers + 1)):
        block = f"input_blocks.{index}"
        if index % (layers + 1) == 0:
            yield from _both([f"{block}.0.op"])
            continue
        yield from _both(f"{block}.0.{part}" for part in _RESNET)
        yield from (f"{block}.1.{name}" for name in attention)
    for index in (0, 2):
        yield from _both(f"middle_block.{index}.{part}" for part in _RESNET)
    yield from (f"middle_block.1.{name}" for name in attention)
    for index in range(levels * (layers + 1)):
        block = f"output_blocks.{index}"
        crossed = config["up_block_types"][index // (layers + 1)].startswith("CrossAttn")
        yield from _both(f"{block}.0.{part}" for part in _RESNET)
        if crossed:
            yield from (f"{block}.1.{name}" for name in attention)
        if index % (layers + 1) == layers:
            yield from _both([f"{block}.{2 if crossed else 1}.conv"])


def _vae_names(config: Mapping[str, Any]) -> Iterator[str]:
    yield from _both(["quant_conv", "post_quant_conv"])
    for half, way, more, scale in (
        ("encoder", "down", 0, "downsample"),
        ("decoder", "up", 1, "upsample"),
    ):
        yield from _both(f"{half}.{part}" for part in ("conv_in", "norm_out", "conv_out"))
        yield from _both(f"{half}.mid.attn_1.{part}" for part in _VAE_ATTENTION)
        for index in (1, 2):
            yield from _both(f"{half}.mid.block_{index}.{part}" for part in _VAE_RESNET)
        for level in range(len(config["block_out_channels"])):
            yield from _both([f"{half}.{way}.{level}.{scale}.conv"])
            for layer in range(config["layers_per_block"] + more):
                block = f"{half}.{way}.{level}.block.{layer}"
                yield from _both(f"{block}.{part}" for part in _VAE_RESNET)


def _open_clip_names(layers: int) -> Iterator[str]:
    yield from ("positional_embedding", "token_embedding.weight")
    yield from _both(["ln_final"])
    for layer in range(layers):
        yield from _both(f"{OPEN_CLIP_LAYERS}{layer}.{part}" for part in _OPEN_CLIP_LAYER)

"""Hyper-parameters deduced from the shapes of a checkpoint in the original (LDM) layout.

Widths, depths and context sizes are visible in the tensors; the number of attention heads and
the groups of the norms are not (see `ldm_hints.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onediff_ext.core.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

UNET_PREFIX = "model.diffusion_model."
VAE_PREFIX = "first_stage_model."
GUIDANCE_KEYS = ("time_embedding.cond_proj.weight", "time_embed.cond_proj.weight")
"""Both spellings that LCM checkpoints use for the guidance embedding, below `UNET_PREFIX`."""


def below(shapes: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the entries under a prefix, without it."""
    cut = len(prefix)
    return {key[cut:]: shape for key, shape in shapes.items() if key.startswith(prefix)}


def count_items(keys: Any, prefix: str) -> int:
    """Count the numbered items `prefix0.`, `prefix1.`, …"""
    cut = len(prefix)
    return len({key[cut:].split(".", 1)[0] for key in keys if key.startswith(prefix)})


def deduce_unet(shapes: Shapes) -> dict[str, Any]:
    """Deduce a diffusers UNet config from shapes without the `UNET_PREFIX`.

    Returns:
        The entries of UNet2DConditionModel's config that shapes tell, `heads` left out.

    Raises:
        CheckpointError: The layers follow no pattern that diffusers has.
    """
    try:
        return _deduce_unet(shapes)
    except KeyError as exc:
        raise CheckpointError(
            f"The UNet lacks the tensor {UNET_PREFIX}{exc.args[0]}.",
            "The file is damaged or of an unknown architecture; use another copy.",
        ) from exc


def _deduce_unet(shapes: Shapes) -> dict[str, Any]:
    widths: list[int] = []
    depths: list[list[int]] = [[]]
    for index in range(1, count_items(shapes, "input_blocks.")):
        name = f"input_blocks.{index}"
        if f"{name}.0.op.weight" in shapes:
            depths.append([])
            continue
        width = shapes[f"{name}.0.out_layers.3.weight"][0]
        if len(widths) < len(depths):
            widths.append(width)
        depths[-1].append(count_items(shapes, f"{name}.1.transformer_blocks."))
    layers = len(depths[0])
    mid_depth = count_items(shapes, "middle_block.1.transformer_blocks.")
    irregular = any(len(level) != layers or len(set(level)) != 1 for level in depths)
    if irregular or not layers or not mid_depth:
        raise CheckpointError(
            "The UNet's layers differ within a level, as in pruned models such as SSD-1B.",
            "Use an SD1, SD2 or SDXL checkpoint, or the model's diffusers folder.",
        )
    level_depths = [level[0] for level in depths]
    # diffusers gives the middle block the last level's depth; without attention there, it is free.
    if level_depths[-1] not in (0, mid_depth):
        raise CheckpointError(
            "The UNet's middle block has another depth than its last level.",
            "Use the model's diffusers folder.",
        )
    crossed = [depth > 0 for depth in level_depths]
    attention = next(key for key in shapes if key.endswith("attn2.to_k.weight"))
    projection = next(key for key in shapes if key.endswith(".proj_in.weight"))
    config: dict[str, Any] = {
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": widths,
        "layers_per_block": layers,
        "down_block_types": [f"{'CrossAttnDown' if x else 'Down'}Block2D" for x in crossed],
        "up_block_types": [f"{'CrossAttnUp' if x else 'Up'}Block2D" for x in reversed(crossed)],
        "transformer_layers_per_block": [*(d or 1 for d in level_depths[:-1]), mid_depth],
        "cross_attention_dim": shapes[attention][1],
        "use_linear_projection": len(shapes[projection]) == 2,
    }
    if "label_emb.0.0.weight" in shapes:
        config["projection_class_embeddings_input_dim"] = shapes["label_emb.0.0.weight"][1]
    for key in GUIDANCE_KEYS:
        if key in shapes:
            config["time_cond_proj_dim"] = shapes[key][1]
    return config


def deduce_vae(shapes: Shapes) -> dict[str, Any]:
    """Deduce a diffusers AutoencoderKL config from shapes without the `VAE_PREFIX`.

    Raises:
        CheckpointError: A tensor that every VAE has is missing.
    """
    try:
        levels = count_items(shapes, "encoder.down.")
        return {
            "in_channels": shapes["encoder.conv_in.weight"][1],
            "out_channels": shapes["decoder.conv_out.weight"][0],
            "latent_channels": shapes["decoder.conv_in.weight"][1],
            "block_out_channels": [
                shapes[f"encoder.down.{level}.block.0.conv2.weight"][0] for level in range(levels)
            ],
            "down_block_types": ["DownEncoderBlock2D"] * levels,
            "up_block_types": ["UpDecoderBlock2D"] * levels,
            "layers_per_block": count_items(shapes, "encoder.down.0.block."),
        }
    except KeyError as exc:
        raise CheckpointError(
            f"The VAE lacks the tensor {exc.args[0]}.", "The file is damaged; use another copy."
        ) from exc


def deduce_text_encoder(shapes: Shapes) -> dict[str, Any]:
    """Deduce a CLIPTextConfig from a text encoder's shapes, CLIP's or OpenCLIP's names.

    Args:
        shapes: Below `…transformer.text_model.` (CLIP) or `…model.` (OpenCLIP).

    Raises:
        CheckpointError: A tensor that every text encoder has is missing.
    """
    try:
        if "positional_embedding" in shapes:
            vocab, width = shapes["token_embedding.weight"]
            layers = "transformer.resblocks."
            inner = shapes[f"{layers}0.mlp.c_fc.weight"][0]
            positions = shapes["positional_embedding"][0]
        else:
            vocab, width = shapes["embeddings.token_embedding.weight"]
            layers = "encoder.layers."
            inner = shapes[f"{layers}0.mlp.fc1.weight"][0]
            positions = shapes["embeddings.position_embedding.weight"][0]
    except KeyError as exc:
        raise CheckpointError(
            f"The text encoder lacks the tensor {exc.args[0]}.",
            "The file is damaged; use another copy.",
        ) from exc
    # text_projection [width, pooled]
    pooled = shapes.get("text_projection", (width, width))[1]
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": count_items(shapes, layers),
        "num_attention_heads": max(1, width // 64),
        "max_position_embeddings": positions,
        "projection_dim": pooled,
    }

"""The .yaml that WebUIs read beside an SD1 or SD2 checkpoint.

Source: its entries are those of the original code's `LatentDiffusion` and `UNetModel` (Rombach et
al. 2022, arXiv:2112.10752).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.ldm_hints import LdmHints


def write_yaml(
    path: Path, parts: Mapping[str, Any], label: str, hints: LdmHints, text_encoder_version: str
) -> None:
    """Write the .yaml of an SD1 or SD2 model.

    Args:
        path: Where.
        parts: Component name → model.
        label: "sd1" or "sd2".
        hints: Heads, prediction type and scale.
        text_encoder_version: SD1's CLIP, by name or as a folder with a config.json and the
            tokenizer's files.

    Raises:
        CheckpointError: The widths are no multiples of the first one.
    """
    import yaml

    unet, vae, noise = (parts[name].config for name in ("unet", "vae", "scheduler"))
    inpaint = unet["in_channels"] == 9
    params: dict[str, Any] = {
        "linear_start": noise["beta_start"],
        "linear_end": noise["beta_end"],
        "num_timesteps_cond": 1,
        "log_every_t": 200,
        "timesteps": noise["num_train_timesteps"],
        "first_stage_key": "jpg",
        "cond_stage_key": "txt",
        "image_size": unet["sample_size"],
        "channels": 4,
        "cond_stage_trainable": False,
        "conditioning_key": "hybrid" if inpaint else "crossattn",
        "monitor": "val/loss_simple_ema",
        "scale_factor": hints.scaling_factor,
        "use_ema": False,
        "unet_config": {
            "target": "ldm.modules.diffusionmodules.openaimodel.UNetModel",
            "params": _unet_params(unet, hints),
        },
        "first_stage_config": {
            "target": "ldm.models.autoencoder.AutoencoderKL",
            "params": _vae_params(vae),
        },
        "cond_stage_config": _text_config(label, text_encoder_version),
    }
    if inpaint:
        params["finetune_keys"] = None
    if hints.prediction_type == "v_prediction":
        params["parameterization"] = "v"
    name = "LatentInpaintDiffusion" if inpaint else "LatentDiffusion"
    config = {"model": {"target": f"ldm.models.diffusion.ddpm.{name}", "params": params}}
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _multiples(widths: Any) -> list[int]:
    first = widths[0]
    if any(width % first for width in widths):
        raise CheckpointError(
            f"The widths {list(widths)} are no multiples of the first, as the .yaml needs.",
            "Save without the .yaml, or choose other widths.",
        )
    return [width // first for width in widths]


def _unet_params(unet: Mapping[str, Any], hints: LdmHints) -> dict[str, Any]:
    crossed = [kind.startswith("CrossAttn") for kind in unet["down_block_types"]]
    depths = unet["transformer_layers_per_block"]
    depth = depths if isinstance(depths, int) else max(depths)
    if not isinstance(depths, int) and len(set(depths)) > 1:
        raise CheckpointError(
            f"The .yaml of this architecture cannot say transformer depths {list(depths)}.",
            "Save without the .yaml.",
        )
    heads: dict[str, Any] = {"num_heads": hints.head_count}
    if hints.head_width:
        heads = {"num_head_channels": hints.head_width}
    linear = {"use_linear_in_transformer": True} if unet["use_linear_projection"] else {}
    return {
        "image_size": 32,
        "in_channels": unet["in_channels"],
        "out_channels": unet["out_channels"],
        "model_channels": unet["block_out_channels"][0],
        "attention_resolutions": [2**level for level, has in enumerate(crossed) if has],
        "num_res_blocks": unet["layers_per_block"],
        "channel_mult": _multiples(unet["block_out_channels"]),
        **heads,
        "use_spatial_transformer": True,
        **linear,
        "transformer_depth": depth,
        "context_dim": unet["cross_attention_dim"],
        "use_checkpoint": False,
        "legacy": False,
    }


def _vae_params(vae: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embed_dim": vae["latent_channels"],
        "monitor": "val/rec_loss",
        "ddconfig": {
            "double_z": True,
            "z_channels": vae["latent_channels"],
            "resolution": 256,
            "in_channels": vae["in_channels"],
            "out_ch": vae["out_channels"],
            "ch": vae["block_out_channels"][0],
            "ch_mult": _multiples(vae["block_out_channels"]),
            "num_res_blocks": vae["layers_per_block"],
            "attn_resolutions": [],
            "dropout": 0.0,
        },
        "lossconfig": {"target": "torch.nn.Identity"},
    }


def _text_config(label: str, version: str) -> dict[str, Any]:
    if label == "sd1":
        return {
            "target": "ldm.modules.encoders.modules.FrozenCLIPEmbedder",
            "params": {"version": version},
        }
    return {
        "target": "ldm.modules.encoders.modules.FrozenOpenCLIPEmbedder",
        "params": {"freeze": True, "layer": "penultimate"},
    }

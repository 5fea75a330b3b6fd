"""The demo model's parts: narrow Stable Diffusion 1.x classes.

Every width is a multiple of 32, because the LDM code always normalises over 32 groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

CONTEXT_WIDTH = 96
"""Width of the text encoder, and so of the UNet's context."""

SCALE_FACTOR = 0.18215
"""SD1's latent scale; the VAE's weights are rescaled after training to match it."""

PART_BYTES = 15_000_000
"""The largest stored part, small enough to copy from a remote machine."""


def build_vae() -> Any:
    """4 latent channels, 8 pixels a cell; LDM: ch 64, ch_mult [1, 1, 1, 2]."""
    return AutoencoderKL(
        block_out_channels=(64, 64, 64, 128),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
        sample_size=256,
        scaling_factor=SCALE_FACTOR,
    )


def build_text_encoder() -> Any:
    """CLIP's text transformer, 3 layers of width 96, with CLIP's own vocabulary."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=CONTEXT_WIDTH,
            intermediate_size=4 * CONTEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            projection_dim=CONTEXT_WIDTH,
            bos_token_id=49406,
            eos_token_id=49407,
            pad_token_id=1,
        )
    )


def build_unet() -> Any:
    """SD1's four levels, 8 heads; LDM: model_channels 64, channel_mult [1, 2, 2, 1]."""
    return UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128, 128, 64),
        layers_per_block=2,
        cross_attention_dim=CONTEXT_WIDTH,
        attention_head_dim=8,
    )


def text_core(text_encoder: Any) -> Any:
    """Return the module that holds the weights, one level down in transformers 4 and early 5."""
    return getattr(text_encoder, "text_model", text_encoder)


def encode_text(text_encoder: Any, token_ids: Tensor) -> Tensor:
    """Run the model's own forward without creating masks, which a CUDA graph cannot contain.

    Args:
        token_ids: [B, 77].

    Returns:
        Context, [B, 77, D].
    """
    core = text_core(text_encoder)
    hidden = core.embeddings(input_ids=token_ids)
    for layer in core.encoder.layers:
        hidden = layer(hidden, attention_mask=None, is_causal=True)
    context: Tensor = core.final_layer_norm(hidden)
    return context


def alphas_cumprod(device: torch.device | str) -> Tensor:
    """Return SD1's noise schedule: the remaining share of the picture's variance, [1000]."""
    betas = torch.linspace(0.00085**0.5, 0.0120**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0).float().to(device)


def save_parts(modules: dict[str, nn.Module], folder: Path, name: str) -> None:
    """Save modules as fp16 in files of at most `PART_BYTES`: "NAME-0.safetensors" and so on."""
    part: dict[str, Tensor] = {}
    index = size_bytes = 0
    for prefix, module in modules.items():
        for key, value in module.state_dict().items():
            tensor = value.half().contiguous().cpu() if value.is_floating_point() else value.cpu()
            if part and size_bytes + tensor.nbytes > PART_BYTES:
                save_file(part, folder / f"{name}-{index}.safetensors")
                part, index, size_bytes = {}, index + 1, 0
            part[f"{prefix}.{key}"] = tensor
            size_bytes += tensor.nbytes
    save_file(part, folder / f"{name}-{index}.safetensors")


def load_parts(modules: dict[str, nn.Module], files: Iterable[Path]) -> None:
    """Load the files of `save_parts`; all keys of all modules must exist."""
    stored: dict[str, Tensor] = {}
    for file in files:
        stored.update(load_file(file))
    for prefix, module in modules.items():
        start = f"{prefix}."
        state = {k.removeprefix(start): v for k, v in stored.items() if k.startswith(start)}
        module.load_state_dict(state)

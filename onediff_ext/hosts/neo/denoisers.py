"""Neo's UNets and transformers (DiT): roles, and noise for a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onediff_ext.core.components import Role
from onediff_ext.hosts.forge_denoisers import UNETS, Denoiser, StepNoise

_TOKENS = 256


def _flux(model: Any, noise: StepNoise) -> dict[str, Any]:
    # Flux.1: x [B, C/4, H/8, W/8]; Flux.2: x [B, C, H/16, W/16]; context [B, 256, D]
    count, patch = noise.images, model.patch_size
    cells = 2 // patch
    found: dict[str, Any] = {
        "x": noise(
            count, model.in_channels // patch**2, noise.height // cells, noise.width // cells
        ),
        "timestep": noise.timesteps(count, 1),
        "context": noise(count, _TOKENS, model.txt_in.weight.shape[1]),
    }
    if hasattr(model, "vec_in_dim"):
        found["y"] = noise(count, model.vec_in_dim)
    if getattr(model, "guidance_embed", False):
        found["guidance"] = torch.full((count,), 3.5, device=noise.device)
    return found


def _lumina(model: Any, noise: StepNoise) -> dict[str, Any]:
    # x [B, 16, H/8, W/8], context [B, 256, D]
    count = noise.images
    return {
        "x": noise(count, model.in_channels, noise.height // 2 * 2, noise.width // 2 * 2),
        "timesteps": noise.timesteps(count, 1),
        "context": noise(count, _TOKENS, model.cap_embedder[1].weight.shape[1]),
    }


def _qwen(model: Any, noise: StepNoise) -> dict[str, Any]:
    # x [2B, 16, 1, H/8, W/8], context [2B, 256, D]
    count = 2 * noise.images
    return {
        "x": noise(count, model.in_channels // 4, 1, noise.height, noise.width),
        "timesteps": noise.timesteps(count, 1),
        "context": noise(count, _TOKENS, model.txt_in.weight.shape[1]),
    }


def _anima(model: Any, noise: StepNoise) -> dict[str, Any]:
    # x [2B, 16, 1, H/8, W/8], context [2B, 512, D]
    count = 2 * noise.images
    return {
        "x": noise(count, model.out_channels, 1, noise.height, noise.width),
        "timesteps": noise.timesteps(count, 1),
        "context": noise(count, 2 * _TOKENS, model.blocks[0].cross_attn.k_proj.weight.shape[1]),
    }


NEO_DENOISERS: Mapping[str, Denoiser] = {
    **UNETS,
    "IntegratedFluxTransformer2DModel": Denoiser(Role.TRANSFORMER, _flux, "flux"),
    "IntegratedChromaTransformer2DModel": Denoiser(Role.TRANSFORMER, _flux, "chroma"),
    "NextDiT": Denoiser(Role.TRANSFORMER, _lumina),
    "QwenImageTransformer2DModel": Denoiser(Role.TRANSFORMER, _qwen, "qwen-image"),
    "Anima": Denoiser(Role.TRANSFORMER, _anima),
}

"""The UNets and transformers (DiT) of Forge and its descendants: roles, and noise for a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.core.components import Role
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.timestep_embedding import TimestepEmbeddings

# Tokens of the text encoder that the hosts pad prompts to.
_T5_TOKENS = 256


@dataclass(frozen=True)
class StepNoise:
    """Makes the arguments of one step.

    Args:
        images: Images of one call without CFG.
        height, width: In latent cells.
        device, dtype: Of the model's inputs.
        generator: Of the noise.
    """

    images: int
    height: int
    width: int
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return noise of this shape."""
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def timesteps(self, count: int, highest: int) -> torch.Tensor:
        """Return one random timestep below `highest`, `count` times: [count]."""
        drawn = torch.rand(1, generator=self.generator) * highest
        return drawn.to(self.device, torch.float32).repeat(count)


def _nothing(
    embeddings: TimestepEmbeddings, patches: Patches, model: Any, device: torch.device
) -> None:
    """Replace nothing."""


@dataclass(frozen=True)
class Denoiser:
    """A class of models that predict the noise.

    Args:
        role: What it is.
        arguments: Returns what one call computes from, with CFG if the model has it: latents and
            timesteps first, then ``context`` and others. `as_in_sampling` adds the rest.
        architecture: Of its checkpoints; empty where the host's class of checkpoint tells.
        embeddings: Replaces what copies from the CPU in its forward, which no CUDA graph can
            record. Takes the model, and where it computes.
    """

    role: Role
    arguments: Callable[[Any, StepNoise], dict[str, Any]]
    architecture: str = ""
    embeddings: Callable[[TimestepEmbeddings, Patches, Any, torch.device], None] = _nothing


def denoiser_of(model: nn.Module, known: Mapping[str, Denoiser]) -> Denoiser | None:
    """Return what is known of a model's class.

    Args:
        model: The host's.
        known: By the name of the class.
    """
    return known.get(type(model).__name__)


def as_in_sampling(
    arguments: Mapping[str, Any], images: int, options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call in the form that the hosts' samplers give it.

    A CUDA graph serves calls of one form.

    Args:
        arguments: From `Denoiser.arguments`: of [images, or twice as many].
        images: Images of the call without CFG.
        options: The ``transformer_options`` that the host keeps with the model.

    Returns:
        Positional and keyword arguments. With CFG, the negative prompt's half comes first.
    """
    given = dict(arguments)
    x, timesteps = (given.pop(name) for name in list(given)[:2])
    parts = [0] if len(x) == images else [1, 0]  # 0 is the prompt's
    marks = [part for part in parts for _ in range(images)]
    told = {
        **options,
        "cond_or_uncond": parts,
        "sigmas": timesteps[:images],
        "cond_mark": torch.tensor(marks).to(timesteps),
        "cond_indices": [place for place, mark in enumerate(marks) if mark == 0],
        "uncond_indices": [place for place, mark in enumerate(marks) if mark == 1],
    }
    known = {"context": given.pop("context"), "control": None, "transformer_options": told}
    return (x, timesteps), {**known, **given}


def _unet(model: Any, noise: StepNoise) -> dict[str, Any]:
    # x [2B, C, H/8, W/8], context [2B, 77, D], y [2B, A] on SDXL only
    count = 2 * noise.images
    found: dict[str, Any] = {
        "x": noise(count, model.in_channels, noise.height, noise.width),
        "timesteps": noise.timesteps(count, 1000).floor(),
        "context": noise(count, 77, _context_width(model)),
    }
    if getattr(model, "num_classes", None) is not None:
        found["y"] = noise(count, model.label_emb[0][0].in_features)
    return found


def _flux(model: Any, noise: StepNoise) -> dict[str, Any]:
    # x [B, C/4, H/8, W/8], context [B, 256, D], y [B, A], guidance [B] in Flux.1-dev only
    count = noise.images
    found: dict[str, Any] = {
        "x": noise(count, model.in_channels // 4, noise.height, noise.width),
        "timestep": noise.timesteps(count, 1),
        "context": noise(count, _T5_TOKENS, model.txt_in.weight.shape[1]),
        "y": noise(count, model.vector_in.in_layer.weight.shape[1]),
    }
    if model.guidance_embed:
        found["guidance"] = torch.full((count,), 3.5, device=noise.device)
    return found


def _chroma(model: Any, noise: StepNoise) -> dict[str, Any]:
    # x [2B, C/4, H/8, W/8], context [2B, 256, D]
    count = 2 * noise.images
    return {
        "x": noise(count, model.in_channels // 4, noise.height, noise.width),
        "timestep": noise.timesteps(count, 1),
        "context": noise(count, _T5_TOKENS, model.txt_in.weight.shape[1]),
    }


def _sd3(model: Any, noise: StepNoise) -> dict[str, Any]:
    # x [2B, C, H/8, W/8], context [2B, 77 + 256, D], y [2B, A]
    count = 2 * noise.images
    return {
        "x": noise(count, model.in_channels, noise.height, noise.width),
        "t": noise.timesteps(count, 1000),
        "context": noise(count, 77 + _T5_TOKENS, model.context_embedder.weight.shape[1]),
        "y": noise(count, model.y_embedder.mlp[0].weight.shape[1]),
    }


UNETS: Mapping[str, Denoiser] = {
    name: Denoiser(Role.UNET, _unet, embeddings=lambda e, p, model, _: e.install(p, model))
    for name in ("IntegratedUNet2DConditionModel", "UNetModel")
}
FORGE_DENOISERS: Mapping[str, Denoiser] = {
    **UNETS,
    "IntegratedFluxTransformer2DModel": Denoiser(Role.TRANSFORMER, _flux, "flux"),
    "IntegratedChromaTransformer2DModel": Denoiser(
        Role.TRANSFORMER, _chroma, "chroma", TimestepEmbeddings.install_counts
    ),
    "MMDiTX": Denoiser(
        Role.TRANSFORMER, _sd3, "sd3", lambda e, p, model, _: e.install_on(p, model.t_embedder)
    ),
}


def _context_width(unet: nn.Module) -> int:
    """Width of a token of the prompt, from the first cross-attention."""
    for name, module in unet.named_modules():
        if name.endswith("attn2.to_k"):
            width: int = module.weight.shape[1]
            return width
    return 0

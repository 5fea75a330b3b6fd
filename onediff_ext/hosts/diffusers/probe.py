"""Run one small forward of each compiled component, to find its kinds before a picture."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from onediff_ext.core.components import Role
from onediff_ext.core.shapes import CELL_PX
from onediff_ext.hosts.diffusers.compile import compiled_state
from onediff_ext.hosts.diffusers.denoiser import takes_guidance
from onediff_ext.hosts.diffusers.transformer_probe import transformer_inputs

_SIDE_LATENT = 16  # 128 pixels: at least two cells at every level of every UNet


def probe(pipe: Any, without: Collection[Role] = ()) -> None:
    """Run each component of a compiled pipeline once on noise, but for those named in `without`.

    This finds missing kinds (the "wait" policy builds them together) and compares existing
    graphs with eager.

    Args:
        pipe: Does nothing if it is not compiled.
        without: Names of components to skip.
    """
    compiled = compiled_state(pipe)
    if compiled is None:
        return
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), compiled.session.holding_builds():
        for component in compiled.components:
            if component.role in without:
                continue
            if not component.runners:
                continue  # nothing to find
            if component.role.is_vae:
                _run_vae_part(pipe, component.role, component.model, generator)
                continue
            inputs = denoiser_inputs(component.model, generator)
            if inputs is not None:
                component.model(**inputs)


def denoiser_inputs(
    model: Any,
    generator: torch.Generator,
    *,
    pictures: int = 1,
    height_px: int = CELL_PX * _SIDE_LATENT,
    width_px: int = CELL_PX * _SIDE_LATENT,
) -> dict[str, Any] | None:
    """Return noise inputs for one forward under guidance.

    Args:
        model: A UNet, a transformer, or a ControlNet of one.
        generator: Of the noise.
        pictures: Number of pictures.
        height_px, width_px: Of a picture.

    Returns:
        Keyword arguments; None for a transformer that is not known.
    """
    if not hasattr(model.config, "cross_attention_dim"):  # all UNets and their ControlNets have it
        return transformer_inputs(
            model, generator, pictures=pictures, height_px=height_px, width_px=width_px
        )
    batch = pictures if takes_guidance(model) else 2 * pictures
    inputs = unet_inputs(
        model,
        generator,
        batch=batch,
        height_latent=height_px // CELL_PX,
        width_latent=width_px // CELL_PX,
    )
    if hasattr(model, "controlnet_cond_embedding"):
        image = torch.rand(batch, 3, height_px, width_px, generator=generator)
        inputs["controlnet_cond"] = image.to(next(model.parameters()))
    return inputs


def unet_inputs(
    unet: Any,
    generator: torch.Generator,
    *,
    batch: int = 2,
    height_latent: int = _SIDE_LATENT,
    width_latent: int = _SIDE_LATENT,
) -> dict[str, Any]:
    """Return noise inputs for one forward of a UNet2DConditionModel or ControlNetModel."""
    config, weight = unet.config, next(unet.parameters())

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    # sample [B, C, H/8, W/8], context [B, 77, D]
    inputs: dict[str, Any] = {
        "sample": noise(batch, config.in_channels, height_latent, width_latent),
        "timestep": torch.randint(1000, (), generator=generator).to(weight.device),
        "encoder_hidden_states": noise(batch, 77, config.cross_attention_dim),
    }
    if takes_guidance(unet):
        inputs["timestep_cond"] = noise(batch, config.time_cond_proj_dim)
    if config.addition_embed_type == "text_time":
        # [pooled text | size and crop numbers]: SDXL's base has six numbers. Its refiner has five,
        # and pooled text as wide as its context.
        width, each = unet.add_embedding.linear_1.in_features, config.addition_time_embed_dim
        pooled = width - 6 * each
        if width - 5 * each == config.cross_attention_dim:
            pooled = config.cross_attention_dim
        inputs["added_cond_kwargs"] = {
            "text_embeds": noise(batch, pooled),
            "time_ids": torch.randint(
                64, 2048, (batch, (width - pooled) // each), generator=generator
            ).to(weight),
        }
    return inputs


def _run_vae_part(pipe: Any, role: Role, model: nn.Module, generator: torch.Generator) -> None:
    vae = pipe.vae
    weight = next(model.parameters())
    # diffusers casts such a VAE up for every picture, since it overflows in float16.
    stored = weight.dtype
    upcast = stored == torch.float16 and vae.config.get("force_upcast", False)
    upcast = upcast and "XL" in type(pipe).__name__
    dtype = torch.float32 if upcast else stored
    channels = 3 if role is Role.VAE_ENCODER else vae.config.latent_channels
    side = _SIDE_LATENT * (8 if role is Role.VAE_ENCODER else 1)
    sample = torch.randn(2, channels, side, side, generator=generator).to(weight.device, dtype)
    if upcast:
        model.to(torch.float32)
    try:
        model(sample)
    finally:
        if upcast:
            model.to(stored)

"""Noise inputs for one forward of diffusers' transformer models and their ControlNets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Noise(NamedTuple):
    """Makes the inputs of one model.

    Args:
        config: The model's.
        like: A weight of the model, for device and dtype.
        generator: Of the noise.
        batch: Latents in the call.
        height, width: Of the latent, in patches of 2x2 cells.
    """

    config: Any
    like: torch.Tensor
    generator: torch.Generator
    batch: int
    height: int
    width: int

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return noise [batch, *shape]."""
        return torch.randn((self.batch, *shape), generator=self.generator).to(self.like)

    @property
    def timestep(self) -> torch.Tensor:
        """The middle of the schedule, as a share of it, [batch]."""
        return torch.full((self.batch,), 0.5).to(self.like)

    def ids(self, text: int, axes: int) -> dict[str, torch.Tensor]:
        """Positions of image tokens [N, axes], row and column last but, and of text tokens."""
        image = torch.zeros(self.height, self.width, axes)
        image[..., 1] = torch.arange(self.height)[:, None]
        image[..., 2] = torch.arange(self.width)[None]
        ids = {"img_ids": image.flatten(0, 1), "txt_ids": torch.zeros(text, axes)}
        return {name: each.to(self.like) for name, each in ids.items()}


class Call(NamedTuple):
    """The call of one kind of model.

    Args:
        inputs: Makes its keyword arguments.
        guided: Latents that one picture takes under guidance in one call.
    """

    inputs: Callable[[Noise], dict[str, Any]]
    guided: int = 1


def _sd3(noise: Noise) -> dict[str, Any]:
    config = noise.config
    return {
        "hidden_states": noise(config.in_channels, 2 * noise.height, 2 * noise.width),
        "encoder_hidden_states": noise(333, config.joint_attention_dim),  # CLIP's 77, T5's 256
        "pooled_projections": noise(config.pooled_projection_dim),
        "timestep": 1000 * noise.timestep,
    }


def _sd3_controlnet(noise: Noise) -> dict[str, Any]:
    channels = noise.config.in_channels + (noise.config.extra_conditioning_channels or 0)
    control = noise(channels, 2 * noise.height, 2 * noise.width)
    return {**_sd3(noise), "controlnet_cond": control}


def _packed(noise: Noise, text: int, axes: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(noise.height * noise.width, noise.config.in_channels),
        "encoder_hidden_states": noise(text, noise.config.joint_attention_dim),
        "timestep": noise.timestep,
        **noise.ids(text, axes),
    }


def _flux(noise: Noise) -> dict[str, Any]:
    inputs = _packed(noise, 512, 3)
    inputs["pooled_projections"] = noise(noise.config.pooled_projection_dim)
    if noise.config.guidance_embeds:
        inputs["guidance"] = torch.full((noise.batch,), 3.5, device=noise.like.device)
    return inputs


def _flux_controlnet(noise: Noise) -> dict[str, Any]:
    control = noise(noise.height * noise.width, noise.config.in_channels)
    return {**_flux(noise), "controlnet_cond": control}


def _chroma(noise: Noise) -> dict[str, Any]:
    tokens = 512 + noise.height * noise.width
    mask = torch.ones(noise.batch, tokens).to(noise.like)
    return {**_packed(noise, 512, 3), "attention_mask": mask}


def _flux2(noise: Noise) -> dict[str, Any]:
    return _packed(noise, 512, 4)


def _qwen_image(noise: Noise) -> dict[str, Any]:
    inputs = _packed(noise, 128, 3)
    del inputs["img_ids"], inputs["txt_ids"]
    return {**inputs, "img_shapes": [[(1, noise.height, noise.width)]] * noise.batch}


def _qwen_image_controlnet(noise: Noise) -> dict[str, Any]:
    control = noise(noise.height * noise.width, noise.config.in_channels)
    return {**_qwen_image(noise), "controlnet_cond": control}


def _z_image(noise: Noise) -> dict[str, Any]:
    latents = noise(noise.config.in_channels, 1, 2 * noise.height, 2 * noise.width)
    return {
        "x": list(latents.unbind()),
        "t": noise.timestep,
        "cap_feats": list(noise(128, noise.config.cap_feat_dim).unbind()),
    }


def _lumina2(noise: Noise) -> dict[str, Any]:
    config = noise.config
    mask = torch.ones(noise.batch, 256, dtype=torch.bool, device=noise.like.device)
    return {
        "hidden_states": noise(config.in_channels, 2 * noise.height, 2 * noise.width),
        "timestep": noise.timestep,
        "encoder_hidden_states": noise(256, config.cap_feat_dim),
        "encoder_attention_mask": mask,
    }


CALLS = {
    "SD3Transformer2DModel": Call(_sd3, guided=2),
    "SD3ControlNetModel": Call(_sd3_controlnet, guided=2),
    "FluxTransformer2DModel": Call(_flux),
    "FluxControlNetModel": Call(_flux_controlnet),
    "ChromaTransformer2DModel": Call(_chroma),
    "Flux2Transformer2DModel": Call(_flux2),
    "QwenImageTransformer2DModel": Call(_qwen_image),
    "QwenImageControlNetModel": Call(_qwen_image_controlnet),
    "ZImageTransformer2DModel": Call(_z_image),
    "Lumina2Transformer2DModel": Call(_lumina2),
}
"""By the name of the model's class."""


def transformer_inputs(
    model: Any, generator: torch.Generator, *, pictures: int, height_px: int, width_px: int
) -> dict[str, Any] | None:
    """Return noise inputs for one forward of a transformer or of its ControlNet.

    Args:
        model: The host's module.
        generator: Of the noise.
        pictures: Number of pictures; models that take guidance in one call get two latents each.
        height_px, width_px: Of a picture; rounded up to multiples of 16.

    Returns:
        Keyword arguments; None for a model that is not known.
    """
    call = CALLS.get(type(model).__name__)
    if call is None:
        return None
    like = next(p for p in model.parameters() if p.is_floating_point())
    height, width = -(-height_px // 16), -(-width_px // 16)
    return call.inputs(Noise(model.config, like, generator, call.guided * pictures, height, width))

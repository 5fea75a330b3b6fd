"""Tiny transformer pipelines (DiT) with seeded random weights, for tests.

They have no text encoders: a call takes embeddings of any length, from `embeddings`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch
from torch import nn

from tests.support.models import build, quiet

LATENT_CHANNELS = 16
TEXT_WIDTH = 24
POOLED_WIDTH = 20

Embeddings = dict[str, torch.Tensor]


def vae(seed: int = 0, channels: int = LATENT_CHANNELS) -> Any:
    """VAE without convolutions around the latent: image [B, 3, H, W] <-> [B, C, H/8, W/8]."""
    return build(
        diffusers.AutoencoderKL,
        seed + 2,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5,
        shift_factor=0.1,
    )


def sd3_transformer(seed: int = 0, layers: int = 3, **config: Any) -> Any:
    """SD3.5-medium's three kinds of block: with a second attention, plain, without text."""
    return build(
        diffusers.SD3Transformer2DModel,
        seed + 3,
        **{
            "sample_size": 32,
            "patch_size": 2,
            "in_channels": LATENT_CHANNELS,
            "out_channels": LATENT_CHANNELS,
            "num_layers": layers,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": TEXT_WIDTH,
            "pooled_projection_dim": POOLED_WIDTH,
            "pos_embed_max_size": 96,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
            **config,
        },
    )


def flux_transformer(seed: int = 0, **config: Any) -> Any:
    """Flux.1-dev's two kinds of block; guidance is an input."""
    return build(
        diffusers.FluxTransformer2DModel,
        seed + 3,
        **{
            "in_channels": 4 * LATENT_CHANNELS,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": TEXT_WIDTH,
            "pooled_projection_dim": POOLED_WIDTH,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
            **config,
        },
    )


def sd3(seed: int = 0, cls: Any = None, **parts: Any) -> Any:
    """A pipeline of SD3.5."""
    cls = cls or diffusers.StableDiffusion3Pipeline
    texts = {
        f"{part}{number}": None
        for part in ("text_encoder", "tokenizer")
        for number in ("", "_2", "_3")
    }
    parts = {"transformer": sd3_transformer(seed), "vae": vae(seed), **texts, **parts}
    return quiet(cls(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), **parts))


def flux(seed: int = 0, cls: Any = None, **parts: Any) -> Any:
    """A pipeline of Flux.1-dev."""
    cls = cls or diffusers.FluxPipeline
    texts = {
        f"{part}{number}": None for part in ("text_encoder", "tokenizer") for number in ("", "_2")
    }
    parts = {"transformer": flux_transformer(seed), "vae": vae(seed), **texts, **parts}
    return quiet(cls(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **parts))


def sd3_controlnet(seed: int = 0) -> Any:
    """ControlNet of two blocks for `sd3_transformer`: one with text, as the model's second."""
    return build(
        diffusers.SD3ControlNetModel,
        seed + 4,
        sample_size=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        pos_embed_max_size=96,
    )


def flux_controlnet(seed: int = 0) -> Any:
    """ControlNet of one block of each kind for `flux_transformer`."""
    return build(
        diffusers.FluxControlNetModel,
        seed + 4,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Seeded noise."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sd3_embeddings(tokens: int, batch: int = 1, seed: int = 0) -> Embeddings:
    """Of prompts and of negative prompts."""
    return {
        "prompt_embeds": noise(batch, tokens, TEXT_WIDTH, seed=seed),
        "negative_prompt_embeds": noise(batch, tokens, TEXT_WIDTH, seed=seed + 1),
        "pooled_prompt_embeds": noise(batch, POOLED_WIDTH, seed=seed + 2),
        "negative_pooled_prompt_embeds": noise(batch, POOLED_WIDTH, seed=seed + 3),
    }


def flux_embeddings(tokens: int, batch: int = 1, seed: int = 0) -> Embeddings:
    """Of prompts."""
    return {
        "prompt_embeds": noise(batch, tokens, TEXT_WIDTH, seed=seed),
        "pooled_prompt_embeds": noise(batch, POOLED_WIDTH, seed=seed + 2),
    }


class Model(NamedTuple):
    """A pipeline to test.

    Args:
        make: Makes the pipeline from a seed.
        embeddings: Makes arguments of its call from numbers of tokens and of prompts, and a seed.
        lora_layers: How the names of layers end that a LoRA may change.
    """

    make: Callable[..., Any]
    embeddings: Callable[..., Embeddings]
    lora_layers: tuple[str, ...] = ("attn.to_q", "attn.add_v_proj", "norm1.linear", "ff.net.2")


MODELS = {
    "sd3": Model(sd3, sd3_embeddings),
    "flux": Model(flux, flux_embeddings),
}


def lora_state(model: nn.Module, names: tuple[str, ...], rank: int = 2, seed: int = 0) -> Any:
    """A random LoRA for the linear layers of a transformer whose names end so."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, layer in model.named_modules():
        name = name.removesuffix(".base_layer")  # another LoRA is loaded
        if isinstance(layer, nn.Linear) and name.endswith(names):
            down = torch.randn(rank, layer.in_features, generator=generator)
            up = torch.randn(layer.out_features, rank, generator=generator)
            state[f"transformer.{name}.lora_A.weight"] = down / layer.in_features**0.5
            state[f"transformer.{name}.lora_B.weight"] = up
    return state

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


def vae(
    seed: int = 0,
    channels: int = LATENT_CHANNELS,
    *,
    widths: tuple[int, ...] = (8, 8, 16, 16),
    layers: int = 1,
    groups: int = 4,
) -> Any:
    """VAE without convolutions around the latent: image [B, 3, H, W] <-> [B, C, H/8, W/8]."""
    return build(
        diffusers.AutoencoderKL,
        seed + 2,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=widths,
        layers_per_block=layers,
        latent_channels=channels,
        norm_num_groups=groups,
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


def chroma_transformer(seed: int = 0) -> Any:
    """Chroma's two kinds of block."""
    return build(
        diffusers.ChromaTransformer2DModel,
        seed + 3,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )


def chroma(seed: int = 0, cls: Any = None, **parts: Any) -> Any:
    """A pipeline of Chroma."""
    transformer = parts.pop("transformer", None) or chroma_transformer(seed)
    return _pipe(cls or diffusers.ChromaPipeline, transformer, vae(seed), **parts)


def flux2(seed: int = 0, cls: Any = None, **parts: Any) -> Any:
    """A pipeline of Flux.2-klein."""
    transformer = build(
        diffusers.Flux2Transformer2DModel,
        seed + 3,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return _pipe(cls or diffusers.Flux2KleinPipeline, transformer, flux2_vae(seed), **parts)


def flux2_vae(seed: int = 0) -> Any:
    """Flux.2's VAE: image [B, 3, H, W] <-> [B, C, H/8, W/8]."""
    return build(
        diffusers.AutoencoderKLFlux2,
        seed + 2,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
    )


def qwen_image_transformer(seed: int = 0, **config: Any) -> Any:
    """Qwen-Image's one kind of block; `zero_cond_t` makes that of Edit-2511."""
    return build(
        diffusers.QwenImageTransformer2DModel,
        seed + 3,
        **{
            "in_channels": 4 * LATENT_CHANNELS,
            "out_channels": LATENT_CHANNELS,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": TEXT_WIDTH,
            "axes_dims_rope": (4, 6, 6),
            **config,
        },
    )


def qwen_vae(seed: int = 0) -> Any:
    """Qwen-Image's VAE of videos."""
    return build(
        diffusers.AutoencoderKLQwenImage,
        seed + 2,
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def qwen_image(seed: int = 0, cls: Any = None, **parts: Any) -> Any:
    """A pipeline of Qwen-Image; text to image is without its VAE of videos."""
    return _pipe(
        cls or diffusers.QwenImagePipeline,
        parts.pop("transformer", None) or qwen_image_transformer(seed),
        None if cls is None else qwen_vae(seed),
        **parts,
    )


def z_image(seed: int = 0, cls: Any = None, **parts: Any) -> Any:
    """A pipeline of Z-Image."""
    transformer = build(
        diffusers.ZImageTransformer2DModel,
        seed + 3,
        in_channels=LATENT_CHANNELS,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    return _pipe(cls or diffusers.ZImagePipeline, transformer, vae(seed), **parts)


def lumina2(seed: int = 0) -> Any:
    """A pipeline of Lumina Image 2."""
    transformer = build(
        diffusers.Lumina2Transformer2DModel,
        seed + 3,
        in_channels=LATENT_CHANNELS,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(600, 64, 64),
        cap_feat_dim=TEXT_WIDTH,
    )
    return _pipe(diffusers.Lumina2Pipeline, transformer, vae(seed))


def _pipe(cls: Any, transformer: Any, vae: Any, **parts: Any) -> Any:
    return quiet(
        cls(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            transformer=transformer,
            vae=vae,
            text_encoder=None,
            tokenizer=None,
            **parts,
        )
    )


def text_embeddings(tokens: int, batch: int = 1, seed: int = 0) -> Embeddings:
    """Of prompts and of negative prompts; guided."""
    return {
        "prompt_embeds": noise(batch, tokens, TEXT_WIDTH, seed=seed),
        "negative_prompt_embeds": noise(batch, tokens, TEXT_WIDTH, seed=seed + 1),
    }


def masked_embeddings(tokens: int, batch: int = 1, seed: int = 0) -> Embeddings:
    """The same with masks; the last token of each prompt but the shortest is padding."""
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[:, max(1, tokens - 1) :] = False
    return {
        **text_embeddings(tokens, batch, seed),
        "prompt_attention_mask": mask,
        "negative_prompt_attention_mask": mask,
    }


def qwen_embeddings(tokens: int, batch: int = 1, seed: int = 0) -> Embeddings:
    """The same; the negative prompt has another length, and one prompt of several has padding."""
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[1:, max(1, tokens - 1) :] = False
    shorter = (tokens + 1) // 2
    return {
        "prompt_embeds": noise(batch, tokens, TEXT_WIDTH, seed=seed),
        "prompt_embeds_mask": mask,
        "negative_prompt_embeds": noise(batch, shorter, TEXT_WIDTH, seed=seed + 1),
        "negative_prompt_embeds_mask": mask[:, :shorter],
    }


def z_image_embeddings(tokens: int, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    """Lists of embeddings [tokens, D]; negative prompts are shorter."""
    return {
        "prompt_embeds": list(noise(batch, tokens, TEXT_WIDTH, seed=seed)),
        "negative_prompt_embeds": list(noise(batch, (tokens + 1) // 2, TEXT_WIDTH, seed=seed + 1)),
    }


class Model(NamedTuple):
    """A pipeline to test.

    Args:
        make: Makes the pipeline from a seed.
        embeddings: Makes arguments of its call from numbers of tokens and of prompts, and a seed.
        lora_layers: How the names of layers end that a LoRA may change.
    """

    make: Callable[..., Any]
    embeddings: Callable[..., dict[str, Any]]
    lora_layers: tuple[str, ...] = ("attn.to_q", "attn.add_v_proj", "norm1.linear", "ff.net.2")


MODELS = {
    "sd3": Model(sd3, sd3_embeddings),
    "flux": Model(flux, flux_embeddings),
    "chroma": Model(chroma, masked_embeddings, ("attn.to_q", "ff.net.2", "proj_mlp")),
    "flux2": Model(flux2, text_embeddings, ("attn.to_q", "ff.linear_out", "to_qkv_mlp_proj")),
    "qwen_image": Model(qwen_image, qwen_embeddings, ("attn.to_q", "attn.add_v_proj", "img_mod.1")),
    "z_image": Model(z_image, z_image_embeddings, ("attention.to_q", "feed_forward.w2")),
    "lumina2": Model(lumina2, masked_embeddings, ("attn.to_q", "feed_forward.linear_2")),
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

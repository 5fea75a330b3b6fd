"""Tiny Stable Diffusion models with seeded random weights, for tests.

Each builder returns a diffusers pipeline of the real architecture (block types, transformer
depths, 8x VAE, GroupNorm of 32 groups) with narrow layers. Weights are scaled so that
activations stay of order one: another seed or another prompt gives another picture.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    LCMScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from onediff_ext.hosts.diffusers.checkpoints.tokenizer import (
    END_OF_TEXT,
    OPEN_CLIP_PAD,
    make_tokenizer,
)

TEXT_WIDTH = 64
"""Width of the first (or only) text encoder; heads are 64 wide as in the real ones."""

TEXT_2_WIDTH = 128
"""Width of SDXL's second text encoder, and of its pooled output."""


@torch.no_grad()
def randomize(module: nn.Module, seed: int) -> None:
    """Fill a module with seeded random weights that keep activations of order one."""
    shapes = tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters())
    for weight, value in zip(module.parameters(), _random_weights(shapes, seed), strict=True):
        weight.copy_(value)


@functools.lru_cache(maxsize=12)  # tests build the same models again and again
def _random_weights(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], seed: int
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = []
    for name, shape in shapes:
        noise = torch.randn(shape, generator=generator)
        if len(shape) >= 2 and "embeddings." in name:
            value = 0.5 * noise
        elif len(shape) >= 2:
            value = noise / (noise.numel() / shape[0]) ** 0.5
        elif name.endswith("weight"):
            value = 1 + 0.1 * noise
        else:
            value = 0.1 * noise
        values.append(value)
    return values


def build(cls: type[nn.Module], seed: int, *args: Any, **kwargs: Any) -> Any:
    """Make a module with seeded random weights."""
    # The modules' own initialisation must not move the caller's random state. Its random numbers
    # are replaced at once, so none are drawn.
    keep = {name: lambda tensor, *bounds, **more: tensor for name in ("normal_", "uniform_")}
    with torch.random.fork_rng(devices=[]), mock.patch.multiple(torch.Tensor, **keep):
        module = cls(*args, **kwargs)
    randomize(module, seed)
    return module.eval().requires_grad_(False)


@functools.cache
def tokenizer(pad_token: str = END_OF_TEXT) -> CLIPTokenizer:
    """CLIP's tokenizer; one instance for each padding token."""
    return make_tokenizer(pad_token)


def text_encoder(
    width: int = TEXT_WIDTH,
    layers: int = 2,
    *,
    seed: int = 0,
    hidden_act: str = "quick_gelu",
    projection: bool = False,
    pad_token_id: int = 1,
) -> Any:
    """CLIP text encoder: tokens [B, 77] -> states [B, 77, width]."""
    config = CLIPTextConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        projection_dim=width,
        hidden_act=hidden_act,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=pad_token_id,
    )
    cls = CLIPTextModelWithProjection if projection else CLIPTextModel
    return build(cls, seed + 1, config)


def vae(
    widths: Sequence[int] = (32, 32, 64, 64),
    *,
    seed: int = 0,
    layers: int = 1,
    scaling_factor: float = 0.18215,
    force_upcast: bool = True,
    latent_channels: int = 4,
) -> Any:
    """Narrow VAE: image [B, 3, H, W] <-> latent [B, C, H/8, W/8]."""
    model = build(
        AutoencoderKL,
        seed + 2,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=tuple(widths),
        layers_per_block=layers,
        latent_channels=latent_channels,
        norm_num_groups=32,
        sample_size=512,
        scaling_factor=scaling_factor,
        force_upcast=force_upcast,
    )
    # Most pixels inside [-1, 1].
    model.decoder.conv_out.weight.mul_(0.4)
    return model


def unet(
    widths: Sequence[int] = (32, 64),
    *,
    seed: int = 0,
    attention: Sequence[bool] | None = None,
    heads: int | tuple[int, ...] = 4,
    depths: int | Sequence[int] = 1,
    in_channels: int = 4,
    out_channels: int = 4,
    context_dim: int = TEXT_WIDTH,
    layers: int = 1,
    **config: Any,
) -> Any:
    """Narrow UNet: latent [B, C, h, w], context [B, n, context_dim] -> [B, out_channels, h, w].

    Without ``attention``, all levels but the last one have it.
    """
    attention = [True] * (len(widths) - 1) + [False] if attention is None else attention
    down = [f"{'CrossAttnDown' if a else 'Down'}Block2D" for a in attention]
    up = [f"{'CrossAttnUp' if a else 'Up'}Block2D" for a in reversed(attention)]
    return build(
        UNet2DConditionModel,
        seed + 3,
        sample_size=64,
        in_channels=in_channels,
        out_channels=out_channels,
        down_block_types=tuple(down),
        up_block_types=tuple(up),
        block_out_channels=tuple(widths),
        layers_per_block=layers,
        norm_num_groups=32,
        cross_attention_dim=context_dim,
        attention_head_dim=heads,
        transformer_layers_per_block=depths,
        **config,
    )


def scheduler(prediction_type: str = "epsilon", timestep_spacing: str = "leading") -> Any:
    """Euler with Stable Diffusion's own noise levels."""
    return EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        num_train_timesteps=1000,
        steps_offset=1,
        prediction_type=prediction_type,
        timestep_spacing=timestep_spacing,
    )


def quiet(pipe: DiffusionPipeline) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _single_encoder(cls: type, parts: dict[str, Any]) -> Any:
    no_checker = {"safety_checker": None, "feature_extractor": None}
    return quiet(cls(**parts, **no_checker, requires_safety_checker=False))


def _sd1_parts(seed: int, **unet_config: Any) -> dict[str, Any]:
    return {
        "vae": vae(seed=seed),
        "text_encoder": text_encoder(seed=seed),
        "tokenizer": tokenizer(),
        "unet": unet(seed=seed, **unet_config),
        "scheduler": scheduler(),
    }


# More levels than `unet` has by default, for what depends on their number.
THREE_LEVELS: dict[str, Any] = {"widths": (32, 64, 64)}


def sd15(seed: int = 0, **unet_config: Any) -> StableDiffusionPipeline:
    """SD1.x: CLIP-L, convolutional projections, one number of heads for every width."""
    return _single_encoder(StableDiffusionPipeline, _sd1_parts(seed, **unet_config))


def sd15_inpaint(seed: int = 0, **unet_config: Any) -> StableDiffusionInpaintPipeline:
    """SD1.x for inpainting: 4 latent + 1 mask + 4 masked-image channels."""
    parts = _sd1_parts(seed, in_channels=9, **unet_config)
    return _single_encoder(StableDiffusionInpaintPipeline, parts)


def lcm(seed: int = 0, **unet_config: Any) -> StableDiffusionPipeline:
    """SD1.x distilled to a latent consistency model: the guidance scale is an input."""
    parts = _sd1_parts(seed, time_cond_proj_dim=32, **unet_config)
    parts["scheduler"] = LCMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
    )
    return _single_encoder(StableDiffusionPipeline, parts)


def _sd2_parts(seed: int, prediction_type: str, **unet_config: Any) -> dict[str, Any]:
    unet_config = {
        "widths": (64, 128),
        "attention": (True, False),
        "heads": (1, 2),
        "use_linear_projection": True,
        **unet_config,
    }
    return {
        "vae": vae(seed=seed),
        "text_encoder": text_encoder(seed=seed, hidden_act="gelu"),
        "tokenizer": tokenizer(OPEN_CLIP_PAD),
        "unet": unet(seed=seed, **unet_config),
        "scheduler": scheduler(prediction_type),
    }


def sd2(
    seed: int = 0, prediction_type: str = "v_prediction", **unet_config: Any
) -> StableDiffusionPipeline:
    """SD2.x: OpenCLIP-H, linear projections, heads of 64; predicts v unless told."""
    parts = _sd2_parts(seed, prediction_type, **unet_config)
    return _single_encoder(StableDiffusionPipeline, parts)


def sd2_inpaint(seed: int = 0, **unet_config: Any) -> StableDiffusionInpaintPipeline:
    """SD2 for inpainting (9 channels, predicts noise)."""
    parts = _sd2_parts(seed, "epsilon", in_channels=9, **unet_config)
    return _single_encoder(StableDiffusionInpaintPipeline, parts)


def _sdxl_unet(seed: int, context_dim: int, time_ids: int, **config: Any) -> Any:
    return unet(
        seed=seed,
        context_dim=context_dim,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=TEXT_2_WIDTH + 32 * time_ids,
        **config,
    )


def _sdxl_parts(seed: int, **unet_config: Any) -> dict[str, Any]:
    unet_config = {
        "widths": (32, 64, 128),
        "attention": (False, True, True),
        "heads": (1, 1, 2),
        "depths": (1, 2, 3),
        **unet_config,
    }
    return {
        "vae": vae(seed=seed, scaling_factor=0.13025),
        "text_encoder": text_encoder(seed=seed),
        "text_encoder_2": _big_text_encoder(seed),
        "tokenizer": tokenizer(),
        "tokenizer_2": tokenizer(OPEN_CLIP_PAD),
        "unet": _sdxl_unet(seed, TEXT_WIDTH + TEXT_2_WIDTH, time_ids=6, **unet_config),
        "scheduler": scheduler(),
    }


def _big_text_encoder(seed: int) -> Any:
    return text_encoder(TEXT_2_WIDTH, 3, seed=seed + 100, hidden_act="gelu", projection=True)


def sdxl(seed: int = 0, **unet_config: Any) -> StableDiffusionXLPipeline:
    """SDXL base: two text encoders, size conditioning, transformers of depth 2 and 3."""
    return quiet(
        StableDiffusionXLPipeline(**_sdxl_parts(seed, **unet_config), add_watermarker=False)
    )


def sdxl_inpaint(seed: int = 0, **unet_config: Any) -> StableDiffusionXLInpaintPipeline:
    """SDXL for inpainting (9 channels)."""
    parts = _sdxl_parts(seed, in_channels=9, **unet_config)
    return quiet(StableDiffusionXLInpaintPipeline(**parts, add_watermarker=False))


def sdxl_refiner(seed: int = 0, **unet_config: Any) -> StableDiffusionXLImg2ImgPipeline:
    """SDXL refiner: only the second text encoder, conditioned on an aesthetic score."""
    unet_config = {
        "widths": (32, 64, 128, 128),
        "attention": (False, True, True, False),
        "heads": (1, 1, 2, 2),
        "depths": 2,
        **unet_config,
    }
    return quiet(
        StableDiffusionXLImg2ImgPipeline(
            vae=vae(seed=seed, scaling_factor=0.13025),
            text_encoder=None,
            text_encoder_2=_big_text_encoder(seed),
            tokenizer=None,
            tokenizer_2=tokenizer(OPEN_CLIP_PAD),
            unet=_sdxl_unet(seed, TEXT_2_WIDTH, time_ids=5, **unet_config),
            scheduler=scheduler(),
            requires_aesthetics_score=True,
            force_zeros_for_empty_prompt=False,
            add_watermarker=False,
        )
    )


def controlnet_for(unet: UNet2DConditionModel, seed: int = 0) -> ControlNetModel:
    """ControlNet that fits a UNet: its encoder copied, the rest random and not zero.

    Returns: hint [B, 3, H, W] -> residuals for each skip connection and the middle.
    """
    accepted = set(inspect.signature(ControlNetModel.__init__).parameters)
    config = {name: value for name, value in unet.config.items() if name in accepted}
    # A ControlNet sees the plain latent, also beside an inpainting UNet.
    config |= {"in_channels": 4, "conditioning_embedding_out_channels": (8, 16, 16, 32)}
    model = build(ControlNetModel, seed + 4, **config)
    for name in ("time_embedding", "add_embedding", "down_blocks", "mid_block"):
        if getattr(unet, name, None) is not None:
            # Not strict: an LCM's time embedding has an input more.
            getattr(model, name).load_state_dict(getattr(unet, name).state_dict(), strict=False)
    if (unet.device, unet.dtype) != (model.device, model.dtype):
        model.to(unet.device, unet.dtype)
    return model


BUILDERS = {
    "sd15": sd15,
    "sd15_inpaint": sd15_inpaint,
    "lcm": lcm,
    "sd2": sd2,
    "sd2_inpaint": sd2_inpaint,
    "sdxl": sdxl,
    "sdxl_inpaint": sdxl_inpaint,
    "sdxl_refiner": sdxl_refiner,
}
"""Name -> builder, for tests over every architecture."""

_LEVELS = {"sdxl": 3, "sdxl_inpaint": 3, "sdxl_refiner": 4}  # two levels otherwise


def one_width(name: str, seed: int = 0) -> Any:
    """A pipeline of any architecture with levels of one width: few kinds, which most share."""
    pipe = BUILDERS[name](seed, widths=(64,) * _LEVELS.get(name, 2), heads=1)
    factor = pipe.vae.config.scaling_factor
    pipe.register_modules(vae=vae((64,) * 4, seed=seed, scaling_factor=factor))
    return pipe


def unet_inputs(
    unet: UNet2DConditionModel,
    batch: int = 2,
    height_latent: int = 16,
    width_latent: int = 16,
    tokens: int = 77,
    seed: int = 0,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Random keyword arguments for one forward of any of these UNets, on its device or another."""
    # Each of these properties walks through all modules.
    device, dtype = unet.device if device is None else device, unet.dtype
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    config = unet.config
    inputs: dict[str, Any] = {
        "sample": noise(batch, config.in_channels, height_latent, width_latent),
        "timestep": torch.tensor(500, device=device),
        "encoder_hidden_states": noise(batch, tokens, config.cross_attention_dim),
    }
    if config.time_cond_proj_dim:
        inputs["timestep_cond"] = noise(batch, config.time_cond_proj_dim)
    if config.addition_embed_type == "text_time":
        spare = config.projection_class_embeddings_input_dim - TEXT_2_WIDTH
        time_ids = torch.full((batch, spare // config.addition_time_embed_dim), 128.0)
        inputs["added_cond_kwargs"] = {
            "text_embeds": noise(batch, TEXT_2_WIDTH),
            "time_ids": time_ids.to(device, dtype),
        }
    return inputs

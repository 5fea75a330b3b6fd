"""Models with random weights for timing; they need no file and no download."""

from __future__ import annotations

import copy
from typing import Any

import torch

from onediff_ext.hosts.diffusers.checkpoints.architectures import read_architecture
from onediff_ext.hosts.diffusers.checkpoints.tokenizer import (
    END_OF_TEXT,
    OPEN_CLIP_PAD,
    make_tokenizer,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ARCHITECTURES = {"small": "sd1", "tiny": "sdxl", "sd15": "sd1"}
"""Extra model names → architecture: two narrow models for a CPU, and a synonym."""

# Widths of the narrow models; depths and block classes stay as in the architecture.
_NARROW_UNETS: dict[str, dict[str, Any]] = {
    "small": {"block_out_channels": (64, 128, 128, 128), "cross_attention_dim": 128},
    "tiny": {
        "block_out_channels": (32, 64, 64),
        "attention_head_dim": (1, 2, 2),
        "transformer_layers_per_block": (1, 1, 2),
        "cross_attention_dim": 128,
        "projection_class_embeddings_input_dim": 64 + 6 * 256,
    },
}
_NARROW_VAES: dict[str, dict[str, Any]] = {
    "small": {"block_out_channels": (32, 64, 64, 64)},
    "tiny": {"block_out_channels": (32, 32, 64, 64), "layers_per_block": 1},
}
_NARROW_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "projection_dim": 64,
}


def architecture_of(model: str) -> Any:
    """Return the published hyper-parameters for a model's name."""
    return read_architecture(ARCHITECTURES.get(model, model))


def make_unet(model: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a UNet with random weights, at full width or narrow."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    config = {**architecture_of(model).unet, **_NARROW_UNETS.get(model, {})}
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            unet = UNet2DConditionModel.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return unet.eval().requires_grad_(False)


def make_vae(model: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return an AutoencoderKL with random weights, at full width or narrow."""
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    config = {**architecture_of(model).vae, **_NARROW_VAES.get(model, {})}
    with torch.device(device):
        vae = AutoencoderKL.from_config(config)
    return vae.to(dtype, memory_format=torch.channels_last).eval().requires_grad_(False)


def make_pipeline(model: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a text to image pipeline with random weights, including text encoders.

    UNet and VAE are scaled so that pictures have contrast. With default initialisation the UNet
    predicts almost no noise and the VAE draws grey, so every comparison would pass.
    """
    import diffusers

    architecture = architecture_of(model)
    parts: dict[str, Any] = {
        "unet": make_unet(model, device, dtype),
        "vae": make_vae(model, device, dtype),
        "scheduler": diffusers.EulerDiscreteScheduler(
            **{
                key: value
                for key, value in architecture.noise.items()
                if key not in ("set_alpha_to_one", "clip_sample")
            }
        ),
    }
    for number, (name, config) in enumerate(architecture.text_encoders.items()):
        narrow = _NARROW_TEXT if model in _NARROW_UNETS else {}
        if model == "small":  # one encoder, as wide as the UNet's context
            narrow = narrow | {"hidden_size": 128, "projection_dim": 128}
        parts[name] = _text_encoder({**config, **narrow}, number, device, dtype)
        pad = OPEN_CLIP_PAD if name == "text_encoder_2" else END_OF_TEXT
        parts[name.replace("text_encoder", "tokenizer")] = make_tokenizer(pad)
    _liven_unet(parts["unet"])
    _liven_vae(parts["vae"])
    pipe: Any
    if "text_encoder_2" in parts:
        pipe = diffusers.StableDiffusionXLPipeline(**parts, add_watermarker=False)
    else:
        pipe = diffusers.StableDiffusionPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    return pipe


def twin(module: Any) -> Any:
    """Return a copy of a module that shares all its tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(t): t for t in tensors})


def _text_encoder(
    config: dict[str, Any], number: int, device: torch.device, dtype: torch.dtype
) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(2 + number)
    cls = CLIPTextModelWithProjection if number else CLIPTextModel
    with torch.device(device):
        made: Any = cls(CLIPTextConfig(**config))
    # With default initialisation the mean of the embeddings is zero but for rounding. WebUIs scale
    # a prompt with weights by a ratio of such means, which is NaN in fp16.
    for name, layer in made.named_modules():
        if name.endswith("final_layer_norm"):
            torch.nn.init.normal_(layer.bias, mean=0.1, std=0.1)
    return made.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def _liven_unet(unet: Any) -> None:
    """Scale a UNet so that it predicts noise of variance one."""
    from onediff_ext.hosts.diffusers.probe import unet_inputs

    predicted = unet(**unet_inputs(unet, torch.Generator().manual_seed(0))).sample
    unet.conv_out.weight.div_(predicted.float().std().to(unet.dtype))


@torch.no_grad()
def _liven_vae(vae: Any) -> None:
    """Scale a VAE to draw with contrast and to encode latents of about variance one."""
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    latent = noise.to(vae.device, vae.dtype) / vae.config.scaling_factor
    drawn = vae.decode(latent).sample
    vae.decoder.conv_out.weight.mul_(0.5 / drawn.float().std())
    picture = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(1)) * 2 - 1
    encoded = vae.encode(picture.to(vae.device, vae.dtype)).latent_dist.mean
    wanted = 1 / (vae.config.scaling_factor * encoded.float().std())
    vae.quant_conv.weight[: vae.config.latent_channels].mul_(wanted)
    vae.quant_conv.bias.zero_()

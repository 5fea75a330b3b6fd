"""A pipeline of Flux.1 with random weights for timing; it needs no file and no download."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.transformer_models import MODELS, make_transformer
from onediff_ext.hosts.diffusers.checkpoints.tokenizer import END_OF_TEXT, make_tokenizer

# Those of the published pipeline; T5 gets the vocabulary of the tokenizer that is at hand.
_CLIP: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "projection_dim": 768,
}  # fmt: skip
_T5: dict[str, Any] = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu", "vocab_size": 49408,
}  # fmt: skip
_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "scaling_factor": 0.3611, "shift_factor": 0.1159, "sample_size": 1024,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
_SCHEDULE: dict[str, Any] = {
    "shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15,
    "base_image_seq_len": 256, "max_image_seq_len": 4096,
}  # fmt: skip
_TOKENS = 512
_NARROW_TEXT: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "d_ff": 128}


def make_flux_pipeline(model: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a FluxPipeline with random weights, including text encoders.

    The VAE is scaled to draw with contrast.

    Args:
        model: "flux", or "small-flux" for a narrow one.
        device, dtype: Of the weights.
    """
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    is_narrow = model != "flux"
    text, clip, vae = dict(_T5), dict(_CLIP), dict(_VAE)
    if is_narrow:
        text |= {**_NARROW_TEXT, "d_model": MODELS[model].config["joint_attention_dim"]}
        clip |= {"num_hidden_layers": 2, "intermediate_size": 128}
        vae |= {"block_out_channels": (32, 32, 64, 64)}
    transformer = make_transformer(model, device, dtype)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(1)
            parts: dict[str, Any] = {
                "text_encoder": CLIPTextModel(CLIPTextConfig(**clip)),
                "text_encoder_2": T5EncoderModel(T5Config(**text)),
                "vae": diffusers.AutoencoderKL(**vae),
            }
    finally:
        torch.set_default_dtype(torch.float32)
    for part in parts.values():
        part.to(dtype).eval().requires_grad_(False)
    _liven(parts["vae"])
    tokenizer = make_tokenizer(END_OF_TEXT)
    tokenizer_2 = make_tokenizer(END_OF_TEXT)
    tokenizer_2.model_max_length = _TOKENS
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**_SCHEDULE),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        **parts,
    )


@torch.no_grad()
def _liven(vae: Any) -> None:
    """Scale a VAE to draw with contrast."""
    noise = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    latent = noise.to(vae.device, vae.dtype) / vae.config.scaling_factor
    vae.decoder.conv_out.weight.mul_(0.5 / vae.decode(latent).sample.float().std())

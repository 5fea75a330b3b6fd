"""Transformers with random weights for timing; they need no file and no download."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_TEXT = {"joint_attention_dim": 4096}
_SD35 = {"qk_norm": "rms_norm", **_TEXT}
_FLUX2_KLEIN = {"joint_attention_dim": 7680, "guidance_embeds": False}


class Published(NamedTuple):
    """A model's class in diffusers and its published hyper-parameters."""

    cls: str
    config: dict[str, Any]


MODELS = {
    "small-flux": Published(
        "FluxTransformer2DModel",
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
            "guidance_embeds": True,
            "axes_dims_rope": (8, 12, 12),
        },
    ),
    "small-sd35": Published(
        "SD3Transformer2DModel",
        {
            "num_layers": 3,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "caption_projection_dim": 64,
            "dual_attention_layers": (0,),
            **_SD35,
        },
    ),
    "small-z-image": Published(
        "ZImageTransformer2DModel",
        {
            "dim": 64,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 64,
            "axes_dims": [8, 12, 12],
        },
    ),
    "small-qwen-image": Published(
        "QwenImageTransformer2DModel",
        {
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
            "axes_dims_rope": (8, 12, 12),
        },
    ),
    "flux": Published("FluxTransformer2DModel", {"guidance_embeds": True}),
    "flux-schnell": Published("FluxTransformer2DModel", {}),
    "flux2-klein-4b": Published(
        "Flux2Transformer2DModel",
        {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, **_FLUX2_KLEIN},
    ),
    "chroma": Published("ChromaTransformer2DModel", {}),
    "sd35-medium": Published(
        "SD3Transformer2DModel",
        {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            **_SD35,
        },
    ),
    "sd35-large": Published(
        "SD3Transformer2DModel",
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            **_SD35,
        },
    ),
    "z-image": Published("ZImageTransformer2DModel", {}),
    "qwen-image": Published("QwenImageTransformer2DModel", {}),
    "lumina2": Published("Lumina2Transformer2DModel", {"cap_feat_dim": 2304}),
}
"""By the name of ``--model``; those that begin with "small-" are narrow."""


def make_transformer(model: str, device: torch.device, dtype: torch.dtype, **changed: Any) -> Any:
    """Return a transformer with random weights.

    Args:
        model: A name of `MODELS`.
        device: Of its weights.
        dtype: Of its weights.
        changed: Hyper-parameters instead of the published ones.
    """
    import diffusers

    published = MODELS[model]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            made = getattr(diffusers, published.cls)(**published.config | changed)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in made.named_parameters():
        if name.endswith("pad_token"):  # made by `torch.empty`
            torch.nn.init.normal_(parameter.data, std=0.02)
    return made.to(dtype).eval().requires_grad_(False)

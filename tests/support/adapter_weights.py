"""Random LoRAs and IP-Adapters for the models of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

IMAGE_WIDTH = 16
"""How many numbers describe an image to an IP-Adapter."""


def lora_tensors(
    pipe: Any,
    layout: str = "diffusers",
    *,
    rank: int = 4,
    alpha: float | None = None,
    text: bool = True,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Random LoRA for every attention of a pipeline, the same numbers in either layout.

    Args:
        pipe: Gives the shapes; is not changed.
        layout: "diffusers" (PEFT's names) or "kohya".
        rank: Of the two factors.
        alpha: kohya's; the product is scaled by alpha / rank. None is rank.
        text: Also the text encoders.
        seed: Of the numbers.
    """
    generator = torch.Generator().manual_seed(seed + 5)
    kohya_names = {"unet": "lora_unet", "text_encoder": "lora_te", "text_encoder_2": "lora_te2"}
    if getattr(pipe, "text_encoder_2", None) is not None:
        kohya_names["text_encoder"] = "lora_te1"
    tensors: dict[str, torch.Tensor] = {}
    for component in ("unet", "text_encoder", "text_encoder_2") if text else ("unet",):
        model = getattr(pipe, component, None)
        if model is None:
            continue
        for name, module in model.named_modules():
            in_attention = any(part in name for part in (".attn1.", ".attn2.", ".self_attn."))
            if not in_attention or not isinstance(module, nn.Linear):
                continue
            if component != "unet" and not name.startswith("text_model."):
                name = f"text_model.{name}"
            down = torch.randn(rank, module.in_features, generator=generator)
            up = torch.randn(module.out_features, rank, generator=generator)
            down, up = down / module.in_features**0.5, up / rank**0.5
            if layout == "diffusers":
                tensors[f"{component}.{name}.lora_A.weight"] = down
                tensors[f"{component}.{name}.lora_B.weight"] = up
                continue
            stem = f"{kohya_names[component]}_{name.replace('.', '_')}"
            tensors[f"{stem}.lora_down.weight"] = down
            tensors[f"{stem}.lora_up.weight"] = up
            tensors[f"{stem}.alpha"] = torch.tensor(float(rank if alpha is None else alpha))
    return tensors


def save_lora(pipe: Any, path: str | Path, layout: str = "diffusers", **options: Any) -> Path:
    """Save a random LoRA for a pipeline; options as `lora_tensors` has them."""
    save_file(lora_tensors(pipe, layout, **options), str(path), metadata={"format": "pt"})
    return Path(path)


def ip_adapter_tensors(
    unet: Any, seed: int = 4, dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of an IP-Adapter for images that are described by `IMAGE_WIDTH` numbers."""
    generator, width = torch.Generator().manual_seed(seed), unet.config.cross_attention_dim

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    layers: dict[str, torch.Tensor] = {}
    crossing = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    for i, name in enumerate(crossing):
        inner = unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for projection in ("to_k_ip", "to_v_ip"):
            layers[f"{2 * i + 1}.{projection}.weight"] = noise(inner, width)
    image = {
        "proj.weight": noise(4 * width, IMAGE_WIDTH),
        "proj.bias": noise(4 * width),
        "norm.weight": 1 + noise(width),
        "norm.bias": noise(width),
    }
    return {"image_proj": image, "ip_adapter": layers}

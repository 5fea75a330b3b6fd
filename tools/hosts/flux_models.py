"""Slim checkpoints of Flux.1-dev and Chroma with random weights, in the layout of their authors.

Two blocks of each kind, 256 channels and two heads. The text encoder T5 has two layers of 128
channels. Forge does not read these numbers from a checkpoint: `WebUI.slim_sources` tells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from onediff_ext.hosts.diffusers.checkpoints.ldm_names import to_ldm_vae
from tests.support import live_files as files
from tests.support import models, transformer_models
from tools.hosts.webuis import FLUX, TEXT_LAYERS, VAE_WIDTHS

_CLIP_L = 768
_LATENT = 64  # 16 channels of 2x2 cells
# Layers of Chroma's network for modulations, and what goes into it.
_GUIDANCE_LAYERS, _GUIDANCE_INPUTS = 5, 64
_HEAD = 128

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_flux_models(folder: Path) -> None:
    """Write slim checkpoints of Flux.1-dev and Chroma, and a LoRA for both.

    Args:
        folder: The WebUI's ``models``.
    """
    for seed, (name, shapes) in enumerate((("slim-flux", _flux()), ("slim-chroma", _chroma()))):
        tensors = {
            f"model.diffusion_model.{k}": v for k, v in random_weights(shapes, seed + 5).items()
        }
        tensors |= _text_encoders(seed, with_clip=name == "slim-flux") | _vae(seed)
        save_halves(tensors, folder / "Stable-diffusion" / f"{name}.safetensors")
    write_block_lora(folder, "random-flux", _DOUBLE, _SINGLE)


def write_block_lora(
    folder: Path,
    name: str,
    double: Mapping[str, tuple[int, int]],
    single: Mapping[str, tuple[int, int]],
) -> None:
    """Write a LoRA for three layers of each double block and all of each single block.

    Args:
        folder: The WebUI's ``models``.
        name: The file's name without its ending.
        double, single: The blocks' linear layers → shapes of their weights.
    """
    shapes = {}
    for number in range(FLUX.depth):
        for layer in ("img_attn.qkv", "txt_mlp.0", "img_attn.proj"):
            shapes[f"double_blocks.{number}.{layer}"] = double[layer.partition("_")[2]]
        for layer, shape in single.items():
            shapes[f"single_blocks.{number}.{layer}"] = shape
    save_halves(kohya_lora(shapes), folder / "Lora" / f"{name}.safetensors")


_SINGLE = {
    "linear1": (7 * FLUX.width, FLUX.width),
    "linear2": (FLUX.width, 5 * FLUX.width),
}
_DOUBLE = {
    "attn.qkv": (3 * FLUX.width, FLUX.width),
    "attn.proj": (FLUX.width, FLUX.width),
    "mlp.0": (4 * FLUX.width, FLUX.width),
    "mlp.2": (FLUX.width, 4 * FLUX.width),
}


def linear(name: str, outputs: int, inputs: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def embedder(name: str, inputs: int, width: int) -> Shapes:
    yield from linear(f"{name}.in_layer", width, inputs)
    yield from linear(f"{name}.out_layer", width, width)


def _blocks() -> Shapes:
    for number in range(FLUX.depth):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{number}.{stream}_"
            for name, shape in _DOUBLE.items():
                yield from linear(prefix + name, *shape)
            for norm in ("query", "key"):
                yield f"{prefix}attn.norm.{norm}_norm.scale", (_HEAD,)
        for name, shape in _SINGLE.items():
            yield from linear(f"single_blocks.{number}.{name}", *shape)
        for norm in ("query", "key"):
            yield f"single_blocks.{number}.norm.{norm}_norm.scale", (_HEAD,)


def _flux() -> Shapes:
    width = FLUX.width
    yield from _blocks()
    for number in range(FLUX.depth):
        for stream in ("img", "txt"):
            yield from linear(f"double_blocks.{number}.{stream}_mod.lin", 6 * width, width)
        yield from linear(f"single_blocks.{number}.modulation.lin", 3 * width, width)
    yield from linear("img_in", width, _LATENT)
    yield from linear("txt_in", width, FLUX.context)
    yield from embedder("time_in", 256, width)
    yield from embedder("guidance_in", 256, width)
    yield from embedder("vector_in", _CLIP_L, width)
    yield from linear("final_layer.linear", _LATENT, width)
    yield from linear("final_layer.adaLN_modulation.1", 2 * width, width)


def _chroma() -> Shapes:
    width, hidden = FLUX.width, FLUX.guidance_width
    yield from _blocks()
    yield from linear("img_in", width, _LATENT)
    yield from linear("txt_in", width, FLUX.context)
    yield from linear("final_layer.linear", _LATENT, width)
    prefix = "distilled_guidance_layer"
    yield from linear(f"{prefix}.in_proj", hidden, _GUIDANCE_INPUTS)
    for number in range(_GUIDANCE_LAYERS):
        yield from embedder(f"{prefix}.layers.{number}", hidden, hidden)
        yield f"{prefix}.norms.{number}.scale", (hidden,)
    yield from linear(f"{prefix}.out_proj", width, hidden)


def random_weights(shapes: Shapes, seed: int) -> dict[str, torch.Tensor]:
    noise, found = files.Noise(seed), {}
    for name, shape in shapes:
        if name.endswith(".scale"):
            found[name] = 1 + noise(*shape, scale=0.1)
        else:
            found[name] = noise(*shape, scale=shape[-1] ** -0.5 if len(shape) > 1 else 0.02)
    return found


def _text_encoders(seed: int, with_clip: bool) -> dict[str, torch.Tensor]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config.from_dict(FLUX.t5)
    encoders = {"t5xxl": models.build(T5EncoderModel, seed + 1, config)}
    if with_clip:
        encoders["clip_l"] = models.text_encoder(_CLIP_L, TEXT_LAYERS, seed=seed)
    found = {}
    for name, encoder in encoders.items():
        inner = "text_model." if name == "clip_l" else ""
        for key, weight in encoder.state_dict().items():
            key = inner + key.removeprefix("text_model.")
            found[f"text_encoders.{name}.transformer.{key}"] = weight
    return found


def _vae(seed: int) -> dict[str, torch.Tensor]:
    made = transformer_models.vae(seed, widths=VAE_WIDTHS, layers=2, groups=32)
    renamed = to_ldm_vae(made.state_dict(), made.config)
    return {f"vae.{key.removeprefix('first_stage_model.')}": v for key, v in renamed.items()}


def kohya_lora(shapes: Mapping[str, tuple[int, int]], rank: int = 4) -> dict[str, torch.Tensor]:
    """A LoRA in kohya's layout.

    Args:
        shapes: Layer, such as ``"double_blocks.0.img_attn.qkv"`` → shape of its weight.
        rank: Of each layer's difference.
    """
    noise, found = files.Noise(9), {}
    for layer, (outputs, inputs) in shapes.items():
        name = layer.replace(".", "_")
        found[f"lora_unet_{name}.lora_down.weight"] = noise(rank, inputs, scale=inputs**-0.5)
        found[f"lora_unet_{name}.lora_up.weight"] = noise(outputs, rank, scale=0.3)
        found[f"lora_unet_{name}.alpha"] = torch.tensor(float(rank))
    return found


def save_halves(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    halves = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in tensors.items()}
    save_file(halves, str(path))

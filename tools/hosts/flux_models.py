"""Checkpoints of Flux.1-dev and Chroma with random weights, in the layout of their authors.

The hosts' test copies get slim ones: two blocks of each kind, 256 channels and two heads, and a
text encoder T5 with two layers of 128 channels. Forge does not read these numbers from a
checkpoint: `WebUI.slim_sources` tells it. Benchmarks use `FULL_FLUX`, the published form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from onediff_ext.hosts.diffusers.checkpoints.ldm_names import to_ldm_vae
from tests.support import live_files as files
from tests.support import models, transformer_models
from tools.hosts.forms import FLUX, VAE_WIDTHS, FluxForm

FULL_FLUX = FluxForm(
    width=3072,
    context=4096,
    double=19,
    single=38,
    guidance_width=5120,
    t5_layers=24,
    t5_heads=64,
    t5_mlp=10240,
    clip_layers=12,
    vae_widths=(128, 256, 512, 512),
)
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
    write_flux(folder, FLUX, "slim-flux")
    chroma = _denoiser(_chroma(FLUX), 6)
    chroma |= _text_encoders(FLUX, 1, with_clip=False) | flux_vae(1)
    save_halves(chroma, folder / "Stable-diffusion" / "slim-chroma.safetensors")
    write_flux_lora(folder, FLUX, "random-flux")


def write_flux(folder: Path, form: FluxForm, name: str, device: str = "cpu") -> None:
    """Write a checkpoint of Flux.1-dev with its text encoders and VAE.

    Args:
        folder: The WebUI's ``models``.
        form: Its numbers.
        name: The file's name without its ending.
        device: Where the weights are made.
    """
    tensors = _denoiser(_flux(form), 5, device) | _text_encoders(form, 0, device=device)
    tensors |= flux_vae(0, form.vae_widths)
    save_halves(tensors, folder / "Stable-diffusion" / f"{name}.safetensors")


def write_flux_lora(folder: Path, form: FluxForm, name: str) -> None:
    """Write a LoRA for three layers of each double block and all of each single block.

    Args:
        folder: The WebUI's ``models``.
        form: The numbers of the checkpoints that it fits.
        name: The file's name without its ending.
    """
    write_block_lora(folder, name, form, _double(form.width), _single(form.width))


def write_block_lora(
    folder: Path,
    name: str,
    form: FluxForm,
    double: Mapping[str, tuple[int, int]],
    single: Mapping[str, tuple[int, int]],
) -> None:
    """Write a LoRA for three layers of each double block and all of each single block.

    Args:
        folder: The WebUI's ``models``.
        name: The file's name without its ending.
        form: How many blocks of each kind there are.
        double, single: The blocks' linear layers → shapes of their weights.
    """
    shapes = {}
    for number in range(form.double):
        for layer in ("img_attn.qkv", "txt_mlp.0", "img_attn.proj"):
            shapes[f"double_blocks.{number}.{layer}"] = double[layer.partition("_")[2]]
    for number in range(form.single):
        for layer, shape in single.items():
            shapes[f"single_blocks.{number}.{layer}"] = shape
    save_halves(kohya_lora(shapes), folder / "Lora" / f"{name}.safetensors")


def _single(width: int) -> dict[str, tuple[int, int]]:
    return {"linear1": (7 * width, width), "linear2": (width, 5 * width)}


def _double(width: int) -> dict[str, tuple[int, int]]:
    return {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.0": (4 * width, width),
        "mlp.2": (width, 4 * width),
    }


def linear(name: str, outputs: int, inputs: int, *kernel: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs, *kernel)
    yield f"{name}.bias", (outputs,)


def embedder(name: str, inputs: int, width: int) -> Shapes:
    yield from linear(f"{name}.in_layer", width, inputs)
    yield from linear(f"{name}.out_layer", width, width)


def _blocks(form: FluxForm) -> Shapes:
    for number in range(form.double):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{number}.{stream}_"
            for name, shape in _double(form.width).items():
                yield from linear(prefix + name, *shape)
            for norm in ("query", "key"):
                yield f"{prefix}attn.norm.{norm}_norm.scale", (_HEAD,)
    for number in range(form.single):
        for name, shape in _single(form.width).items():
            yield from linear(f"single_blocks.{number}.{name}", *shape)
        for norm in ("query", "key"):
            yield f"single_blocks.{number}.norm.{norm}_norm.scale", (_HEAD,)


def _flux(form: FluxForm) -> Shapes:
    width = form.width
    yield from _blocks(form)
    for number in range(form.double):
        for stream in ("img", "txt"):
            yield from linear(f"double_blocks.{number}.{stream}_mod.lin", 6 * width, width)
    for number in range(form.single):
        yield from linear(f"single_blocks.{number}.modulation.lin", 3 * width, width)
    yield from linear("img_in", width, _LATENT)
    yield from linear("txt_in", width, form.context)
    yield from embedder("time_in", 256, width)
    yield from embedder("guidance_in", 256, width)
    yield from embedder("vector_in", _CLIP_L, width)
    yield from linear("final_layer.linear", _LATENT, width)
    yield from linear("final_layer.adaLN_modulation.1", 2 * width, width)


def _chroma(form: FluxForm) -> Shapes:
    width, hidden = form.width, form.guidance_width
    yield from _blocks(form)
    yield from linear("img_in", width, _LATENT)
    yield from linear("txt_in", width, form.context)
    yield from linear("final_layer.linear", _LATENT, width)
    prefix = "distilled_guidance_layer"
    yield from linear(f"{prefix}.in_proj", hidden, _GUIDANCE_INPUTS)
    for number in range(_GUIDANCE_LAYERS):
        yield from embedder(f"{prefix}.layers.{number}", hidden, hidden)
        yield f"{prefix}.norms.{number}.scale", (hidden,)
    yield from linear(f"{prefix}.out_proj", width, hidden)


def random_weights(shapes: Shapes, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random weights in bf16 that keep activations of order one.

    Args:
        shapes: Name and shape of each. One with one dimension is a bias or of a norm, as is a
            ``gamma``.
        seed: Of the noise.
        device: Where they are made; they are returned in main memory.
    """
    noise, found = files.Noise(seed, device), {}
    for name, shape in shapes:
        if name.endswith(".bias"):
            made = noise(*shape, scale=0.02)
        elif len(shape) == 1 or name.endswith(".gamma"):
            made = 1 + noise(*shape, scale=0.1)
        else:
            made = noise(*shape, scale=math.prod(shape[1:]) ** -0.5)
        found[name] = made.to(torch.bfloat16).cpu()
    return found


def prefixed(
    prefix: str, shapes: Shapes, seed: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Random weights of a part of a checkpoint.

    Args:
        prefix: Of the part's names, without the point at its end.
        shapes, seed, device: As `random_weights` has them.
    """
    made = random_weights(shapes, seed, device)
    return {f"{prefix}.{name}": weight for name, weight in made.items()}


def _denoiser(shapes: Shapes, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    return prefixed("model.diffusion_model", shapes, seed, device)


def _text_encoders(
    form: FluxForm, seed: int, *, with_clip: bool = True, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    found = prefixed("text_encoders.t5xxl.transformer", t5(form.t5), seed + 1, device)
    if with_clip:
        clip = models.text_encoder(_CLIP_L, form.clip_layers, seed=seed)
        for name, weight in clip.state_dict().items():
            name = f"text_model.{name.removeprefix('text_model.')}"
            found[f"text_encoders.clip_l.transformer.{name}"] = weight
    return found


def t5(config: Mapping[str, object]) -> Shapes:
    """The weights of a text encoder T5.

    Args:
        config: As transformers has it.
    """
    from transformers import T5Config, T5EncoderModel

    with torch.device("meta"):
        encoder = T5EncoderModel(T5Config.from_dict(dict(config)))
    for name, weight in encoder.state_dict().items():
        yield name, tuple(weight.shape)


def flux_vae(
    seed: int, widths: tuple[int, ...] = VAE_WIDTHS, prefix: str = "vae"
) -> dict[str, torch.Tensor]:
    """Flux.1's VAE in its authors' layout, which Z-Image and Lumina 2 have too, and SD3's.

    Args:
        seed: Of the weights.
        widths: Channels of its levels.
        prefix: Of the weights' names, without the point at its end.
    """
    made = transformer_models.vae(seed, widths=widths, layers=2, groups=32)
    renamed = to_ldm_vae(made.state_dict(), made.config)
    return {f"{prefix}.{key.removeprefix('first_stage_model.')}": v for key, v in renamed.items()}


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

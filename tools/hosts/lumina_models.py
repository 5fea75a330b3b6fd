"""Slim checkpoints of Z-Image and Lumina 2 with random weights, for Forge Neo.

Their blocks are one class. They have Flux.1's VAE.
"""

from __future__ import annotations

from pathlib import Path

from tools.hosts.flux_models import (
    Shapes,
    flux_vae,
    kohya_lora,
    linear,
    prefixed,
    save_halves,
)
from tools.hosts.language_models import language_model, qwen3
from tools.hosts.neo_forms import GEMMA2, LUMINA, QWEN3, Z_IMAGE, BlockForm

_LATENT = 64  # 16 channels of 2x2 cells
_REFINERS = 2
_TIMESTEP = 256  # channels of a timestep's embedding, and of Z-Image's modulation
_ROUNDING = 256  # channels within an MLP are a multiple of it


def write_z_image(folder: Path) -> None:
    """Write a checkpoint of Z-Image, and a LoRA for it.

    Args:
        folder: The WebUI's ``models``.
    """
    shapes = _transformer(Z_IMAGE, QWEN3.width, is_z_image=True)
    weights = prefixed("model.diffusion_model", shapes, 21) | qwen3("4b", QWEN3, 22) | flux_vae(2)
    save_halves(weights, folder / "Stable-diffusion" / "slim-z-image.safetensors")
    _write_lora(folder, Z_IMAGE, "random-z-image", is_z_image=True)


def write_lumina(folder: Path) -> None:
    """Write a checkpoint of Lumina 2, and a LoRA for it.

    Args:
        folder: The WebUI's ``models``.
    """
    shapes = _transformer(LUMINA, GEMMA2.width, is_z_image=False)
    gemma = language_model(GEMMA2, mlp_norms=True)
    weights = prefixed("model.diffusion_model", shapes, 23) | flux_vae(3)
    weights |= prefixed("text_encoders.gemma2_2b.transformer.model", gemma, 24)
    save_halves(weights, folder / "Stable-diffusion" / "slim-lumina.safetensors")
    _write_lora(folder, LUMINA, "random-lumina", is_z_image=False)


def _write_lora(folder: Path, form: BlockForm, name: str, *, is_z_image: bool) -> None:
    linears = _linears(form, is_z_image=is_z_image)
    prefixes = [f"layers.{number}" for number in range(form.blocks)]
    prefixes += ["noise_refiner.0", "context_refiner.1"]
    shapes = {f"{prefix}.{layer}": shape for prefix in prefixes for layer, shape in linears.items()}
    save_halves(kohya_lora(shapes), folder / "Lora" / f"{name}.safetensors")


def _linears(form: BlockForm, *, is_z_image: bool) -> dict[str, tuple[int, int]]:
    """A block's linear layers but for the modulation."""
    width = form.width
    inner = int(width * (8 / 3 if is_z_image else 4))
    inner = -(-inner // _ROUNDING) * _ROUNDING
    outputs = (form.heads + 2 * form.shared_heads) * width // form.heads
    return {
        "attention.qkv": (outputs, width),
        "attention.out": (width, width),
        "feed_forward.w1": (inner, width),
        "feed_forward.w2": (width, inner),
        "feed_forward.w3": (inner, width),
    }


def _block(form: BlockForm, name: str, *, is_z_image: bool, is_modulated: bool) -> Shapes:
    for layer, shape in _linears(form, is_z_image=is_z_image).items():
        yield f"{name}.{layer}.weight", shape
    for norm in ("attention.q_norm", "attention.k_norm"):
        yield f"{name}.{norm}.weight", (form.width // form.heads,)
    for norm in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
        yield f"{name}.{norm}.weight", (form.width,)
    if is_modulated:
        number, inputs = (0, _TIMESTEP) if is_z_image else (1, form.width)
        yield from linear(f"{name}.adaLN_modulation.{number}", 4 * form.width, inputs)


def _transformer(form: BlockForm, context: int, *, is_z_image: bool) -> Shapes:
    width = form.width
    modulation = _TIMESTEP if is_z_image else width
    yield from linear("x_embedder", width, _LATENT)
    for number in range(_REFINERS):
        for name, is_modulated in (("noise_refiner", True), ("context_refiner", False)):
            yield from _block(
                form, f"{name}.{number}", is_z_image=is_z_image, is_modulated=is_modulated
            )
    for number in range(form.blocks):
        yield from _block(form, f"layers.{number}", is_z_image=is_z_image, is_modulated=True)
    yield from linear("t_embedder.mlp.0", width, _TIMESTEP)
    yield from linear("t_embedder.mlp.2", modulation, width)
    yield "cap_embedder.0.weight", (context,)
    yield from linear("cap_embedder.1", width, context)
    yield from linear("final_layer.linear", _LATENT, width)
    yield from linear("final_layer.adaLN_modulation.1", width, modulation)
    if is_z_image:
        yield "x_pad_token", (1, width)
        yield "cap_pad_token", (1, width)

"""Slim checkpoints of Qwen-Image and Anima with random weights, for Forge Neo.

They share a VAE.
"""

from __future__ import annotations

from pathlib import Path

from tools.hosts.flux_models import Shapes, kohya_lora, linear, prefixed, save_halves
from tools.hosts.language_models import language_model, qwen3
from tools.hosts.neo_forms import (
    ADAPTER_HEADS,
    ADAPTER_LAYERS,
    ANIMA,
    QWEN25,
    QWEN25_VISION,
    QWEN_IMAGE,
    SMALL_QWEN3,
)
from tools.hosts.wan_vae_models import wan_vae

_LATENT = 64  # 16 channels of 2x2 cells
_TIMESTEP = 256
_PICTURE_CELLS = 4  # neighbouring tokens that the tower for pictures joins
_T5_WORDS = 32128
_ADALN = 256  # channels within a modulation of Anima


def write_qwen_image(folder: Path) -> None:
    """Write a checkpoint of Qwen-Image, and a LoRA for it.

    Args:
        folder: The WebUI's ``models``.
    """
    text, prefix = language_model(QWEN25, biases=True), "text_encoders.qwen25_7b"
    weights = prefixed("model.diffusion_model", _qwen_image(), 31) | wan_vae(4)
    weights |= prefixed(f"{prefix}.model", text, 32) | prefixed(f"{prefix}.visual", _vision(), 33)
    save_halves(weights, folder / "Stable-diffusion" / "slim-qwen-image.safetensors")
    shapes = {
        f"transformer_blocks.{number}.{layer}": shape
        for number in range(QWEN_IMAGE.blocks)
        for layer, shape in _qwen_linears().items()
    }
    save_halves(kohya_lora(shapes), folder / "Lora" / "random-qwen-image.safetensors")


def write_anima(folder: Path) -> None:
    """Write a checkpoint of Anima, and a LoRA for it.

    Args:
        folder: The WebUI's ``models``.
    """
    weights = prefixed("model.diffusion_model", _anima(), 41) | wan_vae(5)
    weights |= prefixed("model.diffusion_model.llm_adapter", _adapter(), 42)
    weights |= qwen3("06b", SMALL_QWEN3, 43)
    save_halves(weights, folder / "Stable-diffusion" / "slim-anima.safetensors")
    shapes = {
        f"blocks.{number}.{layer}": shape
        for number in range(ANIMA.blocks)
        for layer, shape in _anima_linears().items()
        if "adaln" not in layer
    }
    save_halves(kohya_lora(shapes), folder / "Lora" / "random-anima.safetensors")


def _qwen_linears() -> dict[str, tuple[int, int]]:
    """A block's linear layers but for the modulations."""
    width = QWEN_IMAGE.width
    attention = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    found = {f"attn.{name}": (width, width) for name in (*attention, "to_out.0", "to_add_out")}
    for stream in ("img", "txt"):
        found[f"{stream}_mlp.net.0.proj"] = (4 * width, width)
        found[f"{stream}_mlp.net.2"] = (width, 4 * width)
    return found


def _qwen_image() -> Shapes:
    width = QWEN_IMAGE.width
    yield from linear("time_text_embed.timestep_embedder.linear_1", width, _TIMESTEP)
    yield from linear("time_text_embed.timestep_embedder.linear_2", width, width)
    yield "txt_norm.weight", (QWEN25.width,)
    yield from linear("img_in", width, _LATENT)
    yield from linear("txt_in", width, QWEN25.width)
    for number in range(QWEN_IMAGE.blocks):
        prefix = f"transformer_blocks.{number}"
        for layer, shape in _qwen_linears().items():
            yield from linear(f"{prefix}.{layer}", *shape)
        for stream in ("img", "txt"):
            yield from linear(f"{prefix}.{stream}_mod.1", 6 * width, width)
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            yield f"{prefix}.attn.{norm}.weight", (width // QWEN_IMAGE.heads,)
    yield from linear("norm_out.linear", 2 * width, width)
    yield from linear("proj_out", _LATENT, width)


def _vision() -> Shapes:
    """The text encoder's tower for pictures."""
    width, inner = QWEN25_VISION.width, QWEN25_VISION.inner
    joined = _PICTURE_CELLS * width
    yield "patch_embed.proj.weight", (width, 3, 2, 14, 14)
    for number in range(QWEN25_VISION.layers):
        prefix = f"blocks.{number}"
        for name in ("norm1", "norm2"):
            yield f"{prefix}.{name}.weight", (width,)
        yield from linear(f"{prefix}.attn.qkv", 3 * width, width)
        yield from linear(f"{prefix}.attn.proj", width, width)
        for name in ("gate_proj", "up_proj"):
            yield from linear(f"{prefix}.mlp.{name}", inner, width)
        yield from linear(f"{prefix}.mlp.down_proj", width, inner)
    yield "merger.ln_q.weight", (width,)
    yield from linear("merger.mlp.0", joined, joined)
    yield from linear("merger.mlp.2", QWEN25.width, joined)


def _anima_linears() -> dict[str, tuple[int, int]]:
    """A block's linear layers, which have no biases."""
    width = ANIMA.width
    found = {}
    for name, context in (("self_attn", width), ("cross_attn", SMALL_QWEN3.width)):
        for layer, inputs in (("q_proj", width), ("k_proj", context), ("v_proj", context)):
            found[f"{name}.{layer}"] = (width, inputs)
        found[f"{name}.output_proj"] = (width, width)
    found["mlp.layer1"] = (4 * width, width)
    found["mlp.layer2"] = (width, 4 * width)
    for name in ("self_attn", "cross_attn", "mlp"):
        found[f"adaln_modulation_{name}.1"] = (_ADALN, width)
        found[f"adaln_modulation_{name}.2"] = (3 * width, _ADALN)
    return found


def _anima() -> Shapes:
    width = ANIMA.width
    yield "x_embedder.proj.1.weight", (width, _LATENT + 4)  # the latent and its mask
    yield "t_embedder.1.linear_1.weight", (width, width)
    yield "t_embedder.1.linear_2.weight", (3 * width, width)
    yield "t_embedding_norm.weight", (width,)
    for number in range(ANIMA.blocks):
        for layer, shape in _anima_linears().items():
            yield f"blocks.{number}.{layer}.weight", shape
        for name in ("self_attn", "cross_attn"):
            for norm in ("q_norm", "k_norm"):
                yield f"blocks.{number}.{name}.{norm}.weight", (width // ANIMA.heads,)
    yield "final_layer.linear.weight", (_LATENT, width)
    yield "final_layer.adaln_modulation.1.weight", (_ADALN, width)
    yield "final_layer.adaln_modulation.2.weight", (2 * width, _ADALN)


def _adapter() -> Shapes:
    """What makes Anima's prompt of the text encoder's result and T5's tokens."""
    width = SMALL_QWEN3.width
    yield "embed.weight", (_T5_WORDS, width)
    yield from linear("out_proj", width, width)
    yield "norm.weight", (width,)
    for number in range(ADAPTER_LAYERS):
        prefix = f"blocks.{number}"
        for name in ("self_attn", "cross_attn"):
            yield f"{prefix}.norm_{name}.weight", (width,)
            for layer in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield f"{prefix}.{name}.{layer}.weight", (width, width)
            for norm in ("q_norm", "k_norm"):
                yield f"{prefix}.{name}.{norm}.weight", (width // ADAPTER_HEADS,)
        yield f"{prefix}.norm_mlp.weight", (width,)
        yield from linear(f"{prefix}.mlp.0", 4 * width, width)
        yield from linear(f"{prefix}.mlp.2", width, 4 * width)

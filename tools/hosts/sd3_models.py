"""Slim checkpoints of SD3.5-medium and SD3.5-large with random weights, for Forge.

Forge fixes the widths of their three text encoders and derives the transformer's width from its
number of blocks. So the text encoders have few layers at their usual width.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support import live_files as files
from tests.support import models
from tools.hosts.flux_models import (
    Shapes,
    flux_vae,
    kohya_lora,
    linear,
    prefixed,
    save_halves,
    t5,
)
from tools.hosts.forms import SD3_T5, SD35_LARGE, SD35_MEDIUM, TEXT_LAYERS, SD3Form

_HEAD = 64
_CHANNELS, _PATCH = 16, 2  # of a latent; a token is a patch of cells
_CLIP_L, _CLIP_G, _T5 = 768, 1280, 4096
_TIMESTEP = 256  # channels of a timestep's embedding
_DENOISER = "model.diffusion_model"


def write_sd3_models(folder: Path) -> None:
    """Write slim checkpoints of SD3.5-medium and SD3.5-large, and a LoRA for each.

    Args:
        folder: The WebUI's ``models``.
    """
    for seed, (name, form) in enumerate({"medium": SD35_MEDIUM, "large": SD35_LARGE}.items()):
        weights = prefixed(_DENOISER, transformer(form), 31 + seed)
        weights |= {f"{_DENOISER}.pos_embed": _positions(form, seed)}
        weights |= _text_encoders(seed) | flux_vae(4 + seed, prefix="first_stage_model")
        save_halves(weights, folder / "Stable-diffusion" / f"slim-sd35-{name}.safetensors")
        lora = kohya_lora(_lora_layers(form))
        save_halves(lora, folder / "Lora" / f"random-sd35-{name}.safetensors")


def transformer(form: SD3Form) -> Shapes:
    """The weights of the transformer, but for its embeddings of positions.

    Args:
        form: Its numbers.
    """
    width = form.width
    yield from linear("x_embedder.proj", width, _CHANNELS, _PATCH, _PATCH)
    yield from linear("context_embedder", width, _T5)
    for name, inputs in (("t_embedder", _TIMESTEP), ("y_embedder", _CLIP_L + _CLIP_G)):
        yield from linear(f"{name}.mlp.0", width, inputs)
        yield from linear(f"{name}.mlp.2", width, width)
    for number in range(form.blocks):
        for layer, shape in _linears(form, number).items():
            yield from linear(f"joint_blocks.{number}.{layer}", *shape)
        for attention in _attentions(form, number):
            for norm in ("ln_q", "ln_k"):
                yield f"joint_blocks.{number}.{attention}.{norm}.weight", (_HEAD,)
    yield from linear("final_layer.linear", _CHANNELS * _PATCH**2, width)
    yield from linear("final_layer.adaLN_modulation.1", 2 * width, width)


def _attentions(form: SD3Form, number: int) -> tuple[str, ...]:
    second = ("x_block.attn2",) if number < form.dual else ()
    return ("context_block.attn", "x_block.attn", *second)


def _linears(form: SD3Form, number: int) -> dict[str, tuple[int, int]]:
    """The linear layers of one block → shapes of their weights."""
    width, found = form.width, {}
    last = number == form.blocks - 1  # the text ends with it
    for attention in _attentions(form, number):
        found[f"{attention}.qkv"] = (3 * width, width)
        if not (last and attention.startswith("context")):
            found[f"{attention}.proj"] = (width, width)
    for half in ("x_block",) if last else ("context_block", "x_block"):
        found[f"{half}.mlp.fc1"] = (4 * width, width)
        found[f"{half}.mlp.fc2"] = (width, 4 * width)
    modulations = {"context_block": 2 if last else 6, "x_block": 9 if number < form.dual else 6}
    for half, parts in modulations.items():
        found[f"{half}.adaLN_modulation.1"] = (parts * width, width)
    return found


def _positions(form: SD3Form, seed: int) -> torch.Tensor:
    """Embeddings of positions of order one: [1, positions², width]."""
    return files.Noise(41 + seed)(1, form.positions**2, form.width, scale=0.5)


def _text_encoders(seed: int) -> dict[str, torch.Tensor]:
    # T5 names its embedding twice; the second name is left out.
    shapes = (item for item in t5(SD3_T5) if item[0] != "encoder.embed_tokens.weight")
    found = prefixed("text_encoders.t5xxl.transformer", shapes, 51 + seed)
    for name, width, act in (("clip_l", _CLIP_L, "quick_gelu"), ("clip_g", _CLIP_G, "gelu")):
        clip = models.text_encoder(width, TEXT_LAYERS, seed=seed, hidden_act=act, projection=True)
        for key, weight in clip.state_dict().items():
            found[f"text_encoders.{name}.transformer.{key}"] = weight
    return found


def _lora_layers(form: SD3Form) -> dict[str, tuple[int, int]]:
    """All layers of each block but for its modulations."""
    return {
        f"joint_blocks.{number}.{layer}": shape
        for number in range(form.blocks)
        for layer, shape in _linears(form, number).items()
        if "adaLN" not in layer
    }

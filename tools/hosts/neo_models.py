"""Slim checkpoints with random weights for Forge Neo alone: Mugen and Flux.2-klein.

Both have Flux.2's VAE. Mugen is an SDXL UNet on its latents. Neo fixes the numbers of klein's text
encoder in its code: `WebUI.slim_sources` tells it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from onediff_ext.hosts.diffusers.checkpoints.ldm_names import to_ldm_vae
from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from tests.support import live_files as files
from tests.support import models
from tools.hosts.flux_models import Shapes, prefixed, save_halves, write_block_lora
from tools.hosts.forms import FLUX, VAE_WIDTHS
from tools.hosts.language_models import qwen3
from tools.hosts.neo_forms import KLEIN_OUTPUTS, QWEN3

# Channels of the VAE's latent, and of the 2x2 cells that klein's tokens are.
LATENT, _CELLS = 32, 128
_MLP = 3 * FLUX.width

_DOUBLE = {
    "attn.qkv": (3 * FLUX.width, FLUX.width),
    "attn.proj": (FLUX.width, FLUX.width),
    "mlp.0": (2 * _MLP, FLUX.width),
    "mlp.2": (FLUX.width, _MLP),
}
_SINGLE = {
    "linear1": (3 * FLUX.width + 2 * _MLP, FLUX.width),
    "linear2": (FLUX.width, FLUX.width + _MLP),
}


def write_mugen(folder: Path, parts: dict[str, Any]) -> None:
    """Write a checkpoint of Mugen.

    Args:
        folder: The WebUI's ``models``.
        parts: The components of a slim SDXL whose UNet reads and writes Flux.2's latents.
    """
    path = folder / "Stable-diffusion" / "slim-mugen.safetensors"
    save_ldm({**parts, "vae": _vae(0)}, path, dtype=torch.float16, with_yaml=False)
    statistics = {f"first_stage_model.{k}": v for k, v in _latent_statistics(0).items()}
    save_file({**load_file(str(path)), **statistics}, str(path))


def write_klein(folder: Path) -> None:
    """Write a checkpoint of Flux.2-klein 4B, and a LoRA for it.

    Args:
        folder: The WebUI's ``models``.
    """
    weights = prefixed("model.diffusion_model", _klein(), 11) | qwen3("4b", QWEN3, 12)
    made = _vae(1)
    vae = to_ldm_vae(made.state_dict(), made.config)
    vae = {key.removeprefix("first_stage_model."): weight for key, weight in vae.items()}
    weights |= {f"vae.{key}": weight for key, weight in {**vae, **_latent_statistics(1)}.items()}
    save_halves(weights, folder / "Stable-diffusion" / "slim-klein.safetensors")
    write_block_lora(folder, "random-klein", FLUX, _DOUBLE, _SINGLE)


def _vae(seed: int) -> Any:
    return models.vae(VAE_WIDTHS, seed=seed, layers=2, latent_channels=LATENT)


def _latent_statistics(seed: int) -> dict[str, torch.Tensor]:
    """Mean and variance by which the host scales latents."""
    noise = files.Noise(seed)
    return {
        "bn.running_mean": noise(_CELLS, scale=0.1),
        "bn.running_var": 1 + noise(_CELLS, scale=0.1),
        "bn.num_batches_tracked": torch.tensor(1),
    }


def _klein() -> Shapes:
    """Without biases; one layer modulates all blocks of a kind."""
    width = FLUX.width
    for number in range(FLUX.double):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{number}.{stream}_"
            for name, shape in _DOUBLE.items():
                yield f"{prefix}{name}.weight", shape
            for norm in ("query", "key"):
                yield f"{prefix}attn.norm.{norm}_norm.scale", (QWEN3.head,)
    for number in range(FLUX.single):
        for name, shape in _SINGLE.items():
            yield f"single_blocks.{number}.{name}.weight", shape
        for norm in ("query", "key"):
            yield f"single_blocks.{number}.norm.{norm}_norm.scale", (QWEN3.head,)
    for stream in ("img", "txt"):
        yield f"double_stream_modulation_{stream}.lin.weight", (6 * width, width)
    yield "single_stream_modulation.lin.weight", (3 * width, width)
    yield "img_in.weight", (width, _CELLS)
    yield "txt_in.weight", (width, KLEIN_OUTPUTS * QWEN3.width)
    yield "time_in.in_layer.weight", (width, 256)
    yield "time_in.out_layer.weight", (width, width)
    yield "final_layer.linear.weight", (_CELLS, width)
    yield "final_layer.adaLN_modulation.1.weight", (2 * width, width)

"""A checkpoint of full width and a LoRA for a WebUI, with random weights.

``python -m benchmarks.webui_models sdxl MODELS`` writes them into a WebUI's folder ``models``, as
``random-sdxl``. They draw nothing sensible. They take as long as real ones. ``flux`` is Flux.1-dev
in bf16 with its text encoders and VAE, 34 GB.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.models import DTYPES, make_pipeline
from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from tests.support.adapter_weights import lora_tensors
from tools.hosts.flux_models import FULL_FLUX, write_flux, write_flux_lora


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="sdxl, sd15, flux, or a narrow one: small or tiny")
    parser.add_argument("folder", type=Path, help="the WebUI's models")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp16")
    parser.add_argument("--lora-dtype", choices=tuple(DTYPES), default="fp32", help="not of Flux")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = DTYPES[arguments.dtype], DTYPES[arguments.lora_dtype]
    for path in write_models(arguments.model, arguments.folder, device, *dtypes):
        print(path, flush=True)
    return 0


def write_models(
    model: str,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    lora_dtype: torch.dtype = torch.float32,
) -> tuple[Path, Path]:
    """Write a checkpoint and a LoRA, named ``random-MODEL``; a checkpoint that is there stays.

    Args:
        model: As `make_pipeline` knows it, or ``"flux"``.
        folder: A WebUI's ``models``.
        device: Where the weights are made.
        dtype: Of the weights; those of Flux.1 are in bf16.
        lora_dtype: Of the LoRA's matrices, which Flux.1 has in its own.

    Returns:
        The two files.
    """
    checkpoint = folder / "Stable-diffusion" / f"random-{model}.safetensors"
    lora = folder / "Lora" / f"random-{model}.safetensors"
    if checkpoint.exists() and lora.exists():
        return checkpoint, lora
    if model == "flux":
        write_flux_lora(folder, FULL_FLUX, lora.stem)
        write_flux(folder, FULL_FLUX, checkpoint.stem, device.type)
        return checkpoint, lora
    pipe: Any = make_pipeline(model, device, dtype)
    parts = SimpleNamespace(**pipe.components)
    lora.parent.mkdir(parents=True, exist_ok=True)
    matrices = lora_tensors(parts, "kohya")
    save_file({name: t.to(lora_dtype) for name, t in matrices.items()}, str(lora))
    save_ldm(pipe, checkpoint, with_yaml=False)
    return checkpoint, lora


if __name__ == "__main__":
    raise SystemExit(main())

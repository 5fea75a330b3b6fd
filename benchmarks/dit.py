"""Forwards of transformers: ``python -m benchmarks.dit --model flux --json FILE``.

Models have full width and random weights; ``--model small-flux`` and the like have few and narrow
blocks, to try the command on a CPU. Stable Diffusion 3.5 is called with guidance, which is a batch
of 2; the others take one latent a picture. `forwards` says how it is measured.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contenders import Contender, transformer_contenders
from benchmarks.forwards import Subject, main, parser_of
from benchmarks.transformer_models import MODELS, make_transformer
from onediff_ext.core.shapes import BatchShape
from onediff_ext.hosts.diffusers.transformer_probe import transformer_inputs


class Transformers(Subject):
    """The transformers of `benchmarks.transformer_models`."""

    command = "benchmarks.dit"
    models = tuple(MODELS)
    sizes = "512x512, 768x768, 720x960, 960x720, 832x1216, 1024x1024, 1280x768, 1536x1024"
    peer_sizes = "1024x1024, 512x512, 960x720"
    cuda_dtype = "bf16"
    what = "transformer forward, one picture (with guidance where it is one call)"

    def contenders(self) -> list[Contender]:
        return transformer_contenders()

    def make(self, device: torch.device, dtype: torch.dtype) -> Any:
        return make_transformer(self.given.model, device, dtype)

    def inputs(self, model: Any, size: BatchShape) -> dict[str, Any]:
        inputs = transformer_inputs(
            model, torch.Generator().manual_seed(1),
            pictures=size.batch, height_px=size.height_px, width_px=size.width_px,
        )  # fmt: skip
        assert inputs is not None
        return inputs


if __name__ == "__main__":
    raise SystemExit(main(Transformers, parser_of(Transformers, __doc__ or "").parse_args()))

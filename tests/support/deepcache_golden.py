"""Outputs of the reference implementation of DeepCache; see tools/deepcache/golden.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support import models

GOLDEN = Path(__file__).parents[1] / "golden" / "deepcache-reference.safetensors"


@dataclass(frozen=True)
class Case:
    """One picture of the reference implementation."""

    model: str
    interval: int
    branch: int

    @property
    def name(self) -> str:
        """Its key in the golden file."""
        return f"{self.model}/{self.interval}/{self.branch}"


CASES = [
    *(Case("sd15", interval, 0) for interval in (2, 3, 5)),
    *(Case("sd15", 3, branch) for branch in (1, 2, 3, 5)),
    *(Case("sd2", interval, branch) for interval, branch in ((2, 0), (3, 1), (5, 3))),
    *(Case("sdxl", interval, branch) for interval, branch in ((2, 1), (3, 0), (3, 4), (5, 2))),
]


def golden_pipe(model: str) -> Any:
    """A small pipeline with two layers a block, as the real ones have.

    In float64: in float32 the rounding of another processor came to 1.2e-4 after twelve steps.
    """
    levels = models.THREE_LEVELS if model == "sd15" else {}
    return getattr(models, model)(layers=2, **levels).to(dtype=torch.float64)


def draw_golden(pipe: Any) -> torch.Tensor:
    """Twelve steps at 136x200 pixels, whose latents have an odd width: [1, 4, 17, 25]."""
    with torch.no_grad():
        latents: torch.Tensor = pipe(
            prompt="a cat", negative_prompt="blurred", num_inference_steps=12, height=136,
            width=200, generator=torch.Generator().manual_seed(0), output_type="latent",
        ).images  # fmt: skip
    return latents

"""Pictures of the demo checkpoint, and which of its concepts they show.

The nearest of the 224 reference thumbnails names a picture.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn import functional

from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from onediff_ext.hosts.diffusers.schedulers import make_scheduler

DEMO = Path(str(files("onediff_ext"))) / "assets" / "demo"

CONCEPTS = (
    *("fox", "penguin", "frog", "apple", "hamburger", "rocket"),
    *("house", "sailboat", "robot", "guitar", "umbrella", "tree"),
)


def load_pipeline() -> Any:
    """Load the demo checkpoint with a sampler that needs few steps."""
    loaded = load_checkpoint(DEMO / "onediff-demo.safetensors", dtype=torch.float32).pipeline
    loaded.set_progress_bar_config(disable=True)
    loaded.scheduler = make_scheduler("DPM++ 2M Karras", dict(loaded.scheduler.config))
    return loaded


def prompt_of(name: str) -> str:
    """ "a fox", "an apple"."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def load_references() -> tuple[list[str], torch.Tensor]:
    """Return names, and their thumbnails [N, 3, 32, 32] in 0..1."""
    table = json.loads((DEMO / "concepts.json").read_text(encoding="utf-8"))
    side, per_row, names = table["thumbnail_px"], table["per_row"], table["names"]
    sheet = _tensor(Image.open(DEMO / "concepts.png"))
    tiles = sheet.unfold(1, side, side).unfold(2, side, side)  # [3, rows, columns, side, side]
    tiles = tiles.permute(1, 2, 0, 3, 4).flatten(0, 1)
    assert tiles.shape[0] >= len(names) > per_row
    return names, tiles[: len(names)]


def _tensor(image: Image.Image) -> torch.Tensor:
    """An image as [3, H, W] in 0..1."""
    rgb = image.convert("RGB")
    flat = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return flat.view(rgb.height, rgb.width, 3).permute(2, 0, 1) / 255


def draw(pipe: Any, prompts: list[str], steps: int = 10, **options: Any) -> torch.Tensor:
    """Draw pictures [B, 3, 128, 128] in 0..1, one for each prompt."""
    drawn = pipe(
        prompts, height=128, width=128, num_inference_steps=steps, guidance_scale=4.0,
        generator=[torch.Generator().manual_seed(5) for _ in prompts], output_type="pt", **options,
    )  # fmt: skip
    return drawn.images.float()


def _fit(picture: torch.Tensor) -> torch.Tensor:
    """Crop to what is not white and scale it to fill 28 of 32 pixels: [3, 32, 32]."""
    inked = (picture.min(dim=0).values < 0.9).float()
    rows = torch.nonzero(inked.sum(1) > 1).flatten().tolist() or [0, picture.shape[1] - 1]
    columns = torch.nonzero(inked.sum(0) > 1).flatten().tolist() or [0, picture.shape[2] - 1]
    cut = picture[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    side = max(cut.shape[1:])
    left, top = (side - cut.shape[2]) // 2, (side - cut.shape[1]) // 2
    pad = (left, side - cut.shape[2] - left, top, side - cut.shape[1] - top)
    square = functional.pad(cut, pad, value=1.0)
    small = functional.interpolate(square[None], (28, 28), mode="area")[0]
    return functional.pad(small, (2, 2, 2, 2), value=1.0)


@functools.lru_cache(maxsize=1)
def _fit_each(thumbnails: torch.Tensor) -> torch.Tensor:
    return torch.stack([_fit(thumbnail) for thumbnail in thumbnails])


def nearest_concept(picture: torch.Tensor, references: tuple[list[str], torch.Tensor]) -> str:
    """The concept whose thumbnail is nearest to a picture [3, H, W] in 0..1.

    Args:
        picture: Of one object on white.
        references: From `load_references`.
    """
    names, thumbnails = references
    distance = (_fit_each(thumbnails) - _fit(picture)).square().mean((1, 2, 3))
    return names[int(distance.argmin())]

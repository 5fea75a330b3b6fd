"""`benchmarks.dit` measures narrow transformers on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.transformer_models import MODELS, make_transformer

ROOT = Path(__file__).resolve().parents[2]


def test_rows_of_two_sizes_are_within_rounding(tmp_path: Path) -> None:
    result = tmp_path / "dit.json"
    command = [
        sys.executable, "-m", "benchmarks.dit", "--model", "small-flux", "--device", "cpu",
        "--contenders", "eager,ours-captured-eager", "--sizes", "64x64, 144x160",
        "--rounds", "1", "--steps", "2", "--json", str(result),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    rows = json.loads(result.read_text())["rows"]
    assert [(row["contender"], row["width"], row["height"]) for row in rows] == [
        (name, width, height)
        for width, height in ((64, 64), (144, 160))
        for name in ("eager", "ours-captured-eager")
    ]
    assert all(row["ms_median"] > 0 and row["error_vs_eager"] < 1e-5 for row in rows)


@pytest.mark.parametrize("model", [name for name in MODELS if not name.startswith("small-")])
def test_published_widths_make_a_model(model: str) -> None:
    """On the meta device, so no weight is made."""
    made = make_transformer(model, torch.device("meta"), torch.bfloat16)
    billions = sum(parameter.numel() for parameter in made.parameters()) / 1e9
    published = {
        "flux": 11.9, "flux-schnell": 11.9, "flux2-klein-4b": 3.9, "chroma": 8.9,
        "sd35-medium": 2.24, "sd35-large": 8.1, "z-image": 6.2, "qwen-image": 20.4, "lumina2": 2.6,
    }[model]  # fmt: skip
    assert billions == pytest.approx(published, rel=0.03)

"""Pictures a second of one device: ``python -m benchmarks.throughput --model sdxl --json FILE``.

The settings are those of MLPerf's text to image: 1024x1024, 20 Euler steps with guidance, and any
batch. A picture's time has everything from the prompt to its pixels in main memory: text encoders,
steps and VAE. ``--model flux`` draws as Flux.1-dev is used: in bf16, with embedded guidance and 512
tokens of text. Each contender draws batches without a pause for as long as ``--seconds``, by plain
calls of the pipeline; the best batch counts. Weights are random.

Before that it draws some batches that are not timed: graphs are built, and CUDA graphs recorded.
``error_vs_eager`` compares the last of these with eager's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from benchmarks.flux_pipeline import make_flux_pipeline
from benchmarks.models import make_pipeline
from benchmarks.results import check_mergeable, merge, now, read_result, write_result
from onediff_ext.core.shapes import parse_sizes
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile

CONTENDERS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "plain": {},
    "plain-fp8": {"precision": "fp8"},
}
SETTINGS = ("what", "model", "dtype", "width", "height", "steps", "guidance")
KEY = ("contender", "batch")
_GUIDANCE, _FLUX_GUIDANCE = 8.0, 3.5
_SETTLING = 3  # batches: a shape is seen, recorded and compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="sdxl", help="sdxl, sd15, flux, small, tiny or small-flux"
    )
    parser.add_argument("--size", default="1024x1024")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--seconds", type=float, default=12.0, help="of drawing, for each row")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--store", type=Path, help="default: an empty one, filled first")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replace", action="store_true", help="forget what is in the JSON file")
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    is_flux = arguments.model.endswith("flux")
    half = torch.bfloat16 if is_flux else torch.float16
    dtype = half if device.type == "cuda" else torch.float32
    guidance = _FLUX_GUIDANCE if is_flux else _GUIDANCE
    [size] = parse_sizes(arguments.size)
    figures: dict[str, Any] = {
        "what": "pictures a second of one device",
        "model": arguments.model,
        "dtype": str(dtype).removeprefix("torch."),
        "width": size.width_px,
        "height": size.height_px,
        "steps": arguments.steps,
        "guidance": guidance,
        "fingerprint": fingerprint(device),
        "rows": [],
    }
    keep = arguments.json is not None and not arguments.replace
    old = read_result(arguments.json) if keep else None
    check_mergeable(old, figures, SETTINGS)
    make = make_flux_pipeline if is_flux else make_pipeline
    pipe = make(arguments.model, device, dtype)
    pipe.set_progress_bar_config(disable=True)
    batches = [int(each) for each in arguments.batches.split(",")]
    settings = {
        "width": size.width_px,
        "height": size.height_px,
        "num_inference_steps": arguments.steps,
        "guidance_scale": guidance,
    }
    run = _Run(pipe, settings, arguments.seconds, batches)
    store = arguments.store or Path(tempfile.mkdtemp(prefix="onediff-throughput-"))
    common = {"store": store, "build": "wait", "backend": arguments.backend}
    for name in arguments.contenders.split(","):
        options = CONTENDERS[name]
        if options is not None:
            compile_pipe(pipe, options={**common, **options})
        for batch in batches:
            row = {"contender": name, "batch": batch, "measured": now(), **run.measure(batch)}
            print(json.dumps(row), flush=True)
            figures = merge(figures, {**figures, "rows": [row]}, key=KEY, same=SETTINGS)
            if arguments.json is not None:
                merged = merge(old, figures, key=KEY, same=SETTINGS)
                write_result(arguments.json, merged)
        if options is not None:
            undo_compile(pipe)
    return 0


class _Run:
    """Draws batches.

    Args:
        pipe: A text to image pipeline, not compiled yet.
        settings: Arguments of each call.
        seconds: How long a row draws at least.
        batches: To be measured. Eager's pictures are drawn at once.
    """

    def __init__(
        self, pipe: Any, settings: dict[str, Any], seconds: float, batches: Sequence[int]
    ) -> None:
        self._pipe, self._settings, self._seconds = pipe, settings, seconds
        self._eager = {batch: self._draw(batch) for batch in batches}

    def measure(self, batch: int) -> dict[str, Any]:
        """Return figures of one batch.

        Args:
            batch: Pictures of each call.
        """
        for _ in range(_SETTLING):
            first = self._draw(batch)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start, drawn = time.perf_counter(), 0
        while time.perf_counter() - start < self._seconds:
            self._draw(batch, seed=drawn)
            drawn += batch
        seconds = time.perf_counter() - start
        eager = self._eager[batch].double()
        state = compiled_state(self._pipe)
        return {
            "pictures": drawn,
            "seconds": round(seconds, 2),
            "pictures_per_s": round(drawn / seconds, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)
            if torch.cuda.is_available()
            else None,
            "error_vs_eager": float((first.double() - eager).norm() / eager.norm()),
            "notes": [] if state is None else [str(each) for each in state.session.fallbacks()],
        }

    def _draw(self, batch: int, seed: int = 0) -> torch.Tensor:
        """Return pictures [N, 3, H, W] in main memory."""
        generators = [torch.Generator().manual_seed(seed + number) for number in range(batch)]
        found: torch.Tensor = self._pipe(
            prompt=[f"a painting of a quiet harbour, number {seed + n}" for n in range(batch)],
            negative_prompt=["blurry"] * batch,
            generator=generators,
            output_type="pt",
            **self._settings,
        ).images
        return found.cpu()


if __name__ == "__main__":
    sys.exit(main())

"""VAE decodes, eager and ours: ``python -m benchmarks.vae --model sdxl --json FILE``."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES, make_vae
from benchmarks.timing import median_and_p95, step_times_ms, synchronize
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import parse_sizes
from onediff_ext.engine.check import compare
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, new_session
from onediff_ext.hosts.diffusers.step_bench import paused

SIZES = "512x512, 720x720, 960x720, 896x768, 1024x1024, 1280x1280"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("small", "sd1", "sdxl"), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default=None)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        figures = run(arguments, device, dtype, Path(folder) / "store")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def run(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype, store: Path
) -> dict[str, Any]:
    """Measure decodes of one picture, size by size, in turn with eager."""
    session = new_session(CompileOptions(store=store, build="wait"))
    pipe = SimpleNamespace(vae=make_vae(arguments.model, device, dtype))
    compile_pipe(pipe, session=session)
    compiled = compiled_state(pipe)
    assert compiled is not None
    rows = []
    with torch.no_grad():
        start = time.perf_counter()
        for _ in range(2):  # builds, then compares
            pipe.vae.decode(_latent(parse_sizes("128x136")[0], pipe.vae))
        ready_s = time.perf_counter() - start
        for size in parse_sizes(arguments.sizes):
            latent = _latent(size, pipe.vae)
            with paused(compiled):
                expected = pipe.vae.decode(latent).sample
            start = time.perf_counter()
            found = pipe.vae.decode(latent).sample
            synchronize(device)
            first_s = time.perf_counter() - start
            eager, ours = [], []
            for _ in range(arguments.rounds):
                ours += step_times_ms(lambda: pipe.vae.decode(latent), 2, device)  # noqa: B023
                with paused(compiled):
                    eager += step_times_ms(lambda: pipe.vae.decode(latent), 2, device)  # noqa: B023
            for name, times in (("eager", eager), ("ours-exact", ours)):
                median, p95 = median_and_p95(times)
                rows.append({
                    "contender": name, "dtype": str(dtype).removeprefix("torch."),
                    "width": size.width_px, "height": size.height_px,
                    "first_s": first_s if name != "eager" else None,
                    "ms_median": median, "ms_p95": p95,
                    "error_vs_eager": compare(found, expected).error if name != "eager" else 0.0,
                })  # fmt: skip
                print(f"{size!s:>10} {name:12} {median:8.2f} ms  p95 {p95:8.2f}", flush=True)
    return {
        "what": "VAE decode of one picture",
        "model": arguments.model,
        "fingerprint": fingerprint(device),
        "ready_s": ready_s,
        "kinds": len(session.kinds),
        "states": sorted({kind.state.value for kind in session.kinds}),
        "fallbacks": [vars(f) for f in session.fallbacks()],
        "rows": rows,
    }


def _latent(size: Any, vae: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (1, vae.config.latent_channels, size.height_px // 8, size.width_px // 8)
    return torch.randn(shape, generator=generator).to(vae.device, vae.dtype)


if __name__ == "__main__":
    raise SystemExit(main())

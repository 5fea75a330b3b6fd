"""VAE decodes and encodes, eager and ours: ``python -m benchmarks.vae --model sdxl --json FILE``.

Each size is compared with eager first, then timed in turn with it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES, make_vae
from benchmarks.results import (
    ROW_KEY,
    check_mergeable,
    merge,
    now,
    read_result,
    write_result,
)
from benchmarks.timing import median_and_p95, peak_bytes, reset_peak, step_times_ms, synchronize
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape, parse_sizes
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, new_session
from onediff_ext.hosts.diffusers.jobs.step_bench import paused

SIZES = "512x512, 720x720, 960x720, 896x768, 1024x1024, 1280x1280"
KEY = (*ROW_KEY, "part")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("small", "sd1", "sdxl"), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default=None)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--parts", default="decode,encode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replace", action="store_true", help="forget what is in the JSON file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    head = {
        "what": "VAE, one picture",
        "model": arguments.model,
        "fingerprint": fingerprint(device),
    }
    keep = arguments.json is not None and not arguments.replace
    old = read_result(arguments.json) if keep else None
    check_mergeable(old, head)
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        figures = head | run(arguments, device, dtype, Path(folder) / "store")
    if arguments.json is not None:
        write_result(arguments.json, merge(old, figures, key=KEY))
    return 0


def run(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype, store: Path
) -> dict[str, Any]:
    """Measure one picture at a time, size by size, in turn with eager."""
    session = new_session(CompileOptions(store=store, build="wait"))
    pipe = SimpleNamespace(vae=make_vae(arguments.model, device, dtype))
    compile_pipe(pipe, session=session)
    compiled = compiled_state(pipe)
    assert compiled is not None
    rows = []
    parts = arguments.parts.split(",")
    with torch.no_grad():
        start = time.perf_counter()
        for part in parts * 2:  # builds, then compares
            _call(pipe.vae, part, parse_sizes("128x136")[0])()
        ready_s = time.perf_counter() - start
        for part in parts:
            for size in parse_sizes(arguments.sizes):
                call = _call(pipe.vae, part, size)
                rows += _size(call, part, size, arguments.rounds, device, compiled)
    contender = {
        "measured": now(),
        "ready_s": ready_s,
        "kinds": len(session.kinds),
        "states": sorted({kind.state.value for kind in session.kinds}),
        "fallbacks": [vars(f) for f in session.fallbacks()],
    }
    name = str(dtype).removeprefix("torch.")
    return {
        "contenders": {f"ours-exact {name}": contender},
        "rows": [{**row, "dtype": name, "measured": now()} for row in rows],
    }


def _size(
    call: Callable[[], torch.Tensor],
    part: str,
    size: BatchShape,
    rounds: int,
    device: torch.device,
    compiled: Any,
) -> list[dict[str, Any]]:
    """Eager's row and ours."""
    times: dict[str, list[float]] = {"eager": [], "ours-exact": []}
    first_s, peaks = {}, {}

    def first(name: str) -> torch.Tensor:
        reset_peak(device)
        start = time.perf_counter()
        found = call()
        synchronize(device)
        first_s[name] = time.perf_counter() - start
        peaks[name] = peak_bytes(device)
        return found

    with paused(compiled):
        expected = first("eager")
    found = first("ours-exact")
    errors = {"eager": 0.0, "ours-exact": compare(found, expected).error}
    for _ in range(4):  # a size is captured at its second call and checked at its third
        found = call()
    errors["ours-exact"] = max(errors["ours-exact"], compare(found, expected).error)
    for _ in range(rounds):
        times["ours-exact"] += step_times_ms(call, 2, device)
        with paused(compiled):
            times["eager"] += step_times_ms(call, 2, device)
    rows = []
    for name, measured in times.items():
        median, p95 = median_and_p95(measured)
        rows.append({
            "contender": name, "part": part, "width": size.width_px, "height": size.height_px,
            "first_s": first_s[name], "ms_median": median, "ms_p95": p95,
            "peak_bytes": peaks[name], "error_vs_eager": errors[name],
        })  # fmt: skip
        print(f"{part} {size!s:>10} {name:12} {median:8.2f} ms  p95 {p95:8.2f}"
              f"  error {errors[name]:.1e}", flush=True)  # fmt: skip
    return rows


def _call(vae: Any, part: str, size: BatchShape) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    cells = (size.height_px // 8, size.width_px // 8)
    if part == "decode":
        noise = torch.randn(1, vae.config.latent_channels, *cells, generator=generator)
        latent = noise.to(vae.device, vae.dtype)
        return lambda: vae.decode(latent).sample
    noise = torch.rand(1, 3, size.height_px, size.width_px, generator=generator) * 2 - 1
    picture = noise.to(vae.device, vae.dtype)
    return lambda: vae.encode(picture).latent_dist.mean


if __name__ == "__main__":
    raise SystemExit(main())

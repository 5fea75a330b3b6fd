"""VAE decodes and encodes: ``python -m benchmarks.vae --model sdxl --json FILE``.

Eager, ours, and a user's own calls ("plain"). Each size is compared with eager first, then all
take turns.
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
from benchmarks.models import DTYPES, make_vae, twin
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
from onediff_ext.hosts.diffusers.compile_module import compile_module
from onediff_ext.session.session import Session

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
    """Measure single pictures of each size: eager, ours, and plain calls, in turn."""
    eager = make_vae(arguments.model, device, dtype)
    ours, plain = twin(eager), twin(eager)
    session = new_session(CompileOptions(store=store, build="wait"))
    compile_pipe(SimpleNamespace(vae=ours), session=session)
    vaes = {"eager": eager, "ours-exact": ours, "plain": plain}
    parts, rows, contenders = arguments.parts.split(","), [], {}
    name = str(dtype).removeprefix("torch.")
    with torch.no_grad():
        contenders[f"ours-exact {name}"] = _ready(ours, session, parts)
        compile_module(plain, options={"store": store})
        state = compiled_state(plain)
        assert state is not None
        contenders[f"plain {name}"] = _ready(plain, state.session, parts)
        for part in parts:
            for size in parse_sizes(arguments.sizes):
                calls = {contender: _call(vae, part, size) for contender, vae in vaes.items()}
                rows += _size(calls, part, size, arguments.rounds, device)
    return {
        "contenders": contenders,
        "rows": [{**row, "dtype": name, "measured": now()} for row in rows],
    }


def _ready(vae: Any, session: Session, parts: list[str]) -> dict[str, Any]:
    """Call a compiled VAE until its graphs are built and compared with eager."""
    start = time.perf_counter()
    for part in parts * 2:
        _call(vae, part, parse_sizes("128x136")[0])()
        session.wait_for_builds()
    return {
        "measured": now(),
        "ready_s": time.perf_counter() - start,
        "kinds": len(session.kinds),
        "states": sorted({kind.state.value for kind in session.kinds}),
        "fallbacks": [vars(f) for f in session.fallbacks()],
    }


def _size(
    calls: dict[str, Callable[[], torch.Tensor]],
    part: str,
    size: BatchShape,
    rounds: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return a row for each contender at one size."""
    rows: dict[str, dict[str, Any]] = {}
    expected: torch.Tensor | None = None
    for name, call in calls.items():
        reset_peak(device)
        start = time.perf_counter()
        found = call()
        synchronize(device)
        first_s = time.perf_counter() - start
        expected = found if expected is None else expected  # eager is the first one
        error = compare(found, expected).error
        for _ in range(4):
            found = call()
        rows[name] = {
            "contender": name, "part": part, "width": size.width_px, "height": size.height_px,
            "first_s": first_s, "peak_bytes": peak_bytes(device),
            "error_vs_eager": max(error, compare(found, expected).error),
        }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name] += step_times_ms(call, 2, device)
    for name, row in rows.items():
        row["ms_median"], row["ms_p95"] = median_and_p95(times[name])
        print(f"{part} {size!s:>10} {name:12} {row['ms_median']:8.2f} ms  p95 {row['ms_p95']:8.2f}"
              f"  error {row['error_vs_eager']:.1e}", flush=True)  # fmt: skip
    return list(rows.values())


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

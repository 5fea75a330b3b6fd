"""One set of graphs for any size: ``python -m benchmarks.any_size --json FILE``.

Runs UNet forwards of random sizes and batches with an initially empty store. It counts recompiles,
compares each size with eager, records the slowest step of each size and memory, and then starts a
second process with the same store. All calls are plain calls of the UNet.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES, make_unet
from benchmarks.timing import held_bytes, synchronize
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, new_session
from onediff_ext.hosts.diffusers.jobs.run_report import recompile_count
from onediff_ext.hosts.diffusers.jobs.step_bench import paused
from onediff_ext.hosts.diffusers.probe import unet_inputs

NAMED_SIZES = ((1024, 1024), (960, 720), (720, 720), (512, 512), (1280, 1280), (136, 200))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("small", "sd1", "sd2", "sdxl"), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default=None)
    parser.add_argument("--sizes", type=int, default=30, help="random sizes, 64 to --largest")
    parser.add_argument("--largest", type=int, default=1024, help="longest side in pixels")
    parser.add_argument("--steps", type=int, default=6, help="timed steps at each size")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="the second process")
    arguments = parser.parse_args()
    if arguments.store is not None:
        figures = _measure(arguments)
    else:
        with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
            arguments.store = Path(folder) / "store"
            figures = _measure(arguments)
            figures["second_process"] = _run_again(arguments)
    text = json.dumps(figures, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text if arguments.again else json.dumps({**figures, "rows": "..."}, indent=1))
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    dtype = DTYPES[arguments.dtype or ("fp16" if device.type == "cuda" else "fp32")]
    pipe = SimpleNamespace(unet=make_unet(arguments.model, device, dtype))
    session = new_session(CompileOptions(build="wait", store=arguments.store))
    start = time.perf_counter()
    compile_pipe(pipe, session=session)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        first = unet_inputs(pipe.unet, generator)
        pipe.unet(**first)  # finds the kinds, builds or loads them
        synchronize(device)
        ready_s = time.perf_counter() - start
        pipe.unet(**first)  # compares them with eager
        synchronize(device)
    figures: dict[str, Any] = {
        "what": "any size",
        "model": arguments.model,
        "dtype": str(dtype).removeprefix("torch."),
        "fingerprint": fingerprint(device),
        "ready_s": ready_s,
        "kinds": len(session.kinds),
        "built": session.count("built"),
        "loaded": session.count("loaded"),
    }
    recompiles = recompile_count()
    count = 2 if arguments.again else arguments.sizes
    rows = [
        _measure_size(pipe, device, arguments.steps, *size)
        for size in _sizes(count, arguments.largest)
    ]
    return figures | {
        "recompiles": recompile_count() - recompiles,
        "states": sorted({kind.state.value for kind in session.kinds}),
        "fallbacks": [vars(f) for f in session.fallbacks()],
        "largest_error": max(row["error"] for row in rows),
        "slowest_over_median": max(row["slowest_ms"] / row["compiled_ms"] for row in rows),
        "memory_after_5_bytes": rows[min(4, len(rows) - 1)]["memory_bytes"],
        "memory_at_end_bytes": rows[-1]["memory_bytes"],
        "rows": rows,
    }


def _sizes(count: int, largest_px: int) -> list[tuple[int, int, int]]:
    """Return random (width, height, batch), sides multiples of 8, and then `NAMED_SIZES`."""
    chooser = random.Random(0)
    sides = range(64, largest_px + 1, 8)
    drawn = [
        (chooser.choice(sides), chooser.choice(sides), chooser.randint(1, 4)) for _ in range(count)
    ]
    return drawn + [(w, h, 2) for w, h in NAMED_SIZES if max(w, h) <= largest_px]


def _measure_size(
    pipe: Any, device: torch.device, steps: int, width_px: int, height_px: int, batch: int
) -> dict[str, Any]:
    inputs = unet_inputs(
        pipe.unet, torch.Generator().manual_seed(1), batch=batch,
        height_latent=height_px // 8, width_latent=width_px // 8,
    )  # fmt: skip
    compiled = compiled_state(pipe)
    assert compiled is not None
    with torch.no_grad():
        with paused(compiled):
            expected = pipe.unet(**inputs).sample
        start = time.perf_counter()
        found = pipe.unet(**inputs).sample
        synchronize(device)
        first_s = time.perf_counter() - start
        error = compare(found, expected).error
        fast, eager = [], []
        for _ in range(steps):
            fast.append(_timed_ms(pipe.unet, inputs, device))
            with paused(compiled):
                eager.append(_timed_ms(pipe.unet, inputs, device))
    return {
        "contender": "plain",
        "width": width_px,
        "height": height_px,
        "batch": batch,
        "first_s": first_s,
        "compiled_ms": statistics.median(fast),
        "slowest_ms": max(fast),
        "eager_ms": statistics.median(eager),
        "error": error,
        "memory_bytes": held_bytes(device),
    }


def _timed_ms(unet: Any, inputs: dict[str, Any], device: torch.device) -> float:
    start = time.perf_counter()
    unet(**inputs)
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _run_again(arguments: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "benchmarks.any_size", "--again", "--model", arguments.model,
        "--device", arguments.device, "--store", str(arguments.store), "--steps", "3",
        "--largest", str(arguments.largest),
    ]  # fmt: skip
    if arguments.dtype is not None:
        command += ["--dtype", arguments.dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return {"error": result.stderr[-2000:]}
    figures: dict[str, Any] = json.loads(result.stdout)
    return {k: figures[k] for k in ("ready_s", "built", "loaded", "recompiles", "largest_error")}


if __name__ == "__main__":
    sys.exit(main())

"""Pictures under a memory limit: ``python -m benchmarks.small_gpu --gigabytes 8 --json FILE``.

A large GPU plays a small one (`benchmarks.limited_memory`). Without ``--host`` diffusers draws.
Rows say how long a picture took, the most memory that torch had reserved, and how often memory ran
out. Graphs are built before the timed pictures. ``--host`` names a WebUI and ``--checkout`` its
folder, which has this extension; `benchmarks.small_gpu_webui` says what is drawn there.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import small_gpu_webui
from benchmarks.fingerprint import fingerprint
from benchmarks.limited_memory import limit_memory
from benchmarks.models import DTYPES, make_pipeline
from benchmarks.results import check_mergeable, merge, now, read_result, write_result
from benchmarks.timing import synchronize
from onediff_ext.core.shapes import parse_sizes

OFFLOADS: dict[str, Callable[[Any], None]] = {
    "none": lambda pipe: pipe.to("cuda" if torch.cuda.is_available() else "cpu"),
    "model": lambda pipe: pipe.enable_model_cpu_offload(),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "group": lambda pipe: pipe.enable_group_offload(
        onload_device=torch.device("cuda"), offload_type="block_level", num_blocks_per_group=1
    ),
}
MODELS = ("tiny", "small", "sd1", "sdxl")  # of diffusers; a WebUI's model is only named
HOSTS = ("diffusers", "a1111", "forge", "reforge", "neo")
CONTENDERS = ("eager", "ours")
SETTINGS = ("what", "model", "steps", "gigabytes", "host", "offload")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--host", choices=HOSTS, default=HOSTS[0])
    parser.add_argument("--offload", choices=sorted(OFFLOADS), default="model")
    parser.add_argument(
        "--model", default="tiny", help=f"one of {', '.join(MODELS)}; of a WebUI, its name"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES))
    parser.add_argument("--sizes", default="1024x1024, 768x1152")
    parser.add_argument("--scale", type=int, default=1, help="divide sizes by it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=3, help="timed ones of each size")
    parser.add_argument("--contenders", help="of eager and ours; for a WebUI, of host and ours")
    parser.add_argument("--limit-s", type=float, default=170, help="for each contender")
    parser.add_argument("--store", type=Path, help="kept for later runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replace", action="store_true", help="forget what is in the JSON file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    webui = parser.add_argument_group("only for a WebUI")
    webui.add_argument("--checkout", type=Path, help="its folder")
    webui.add_argument("--flags", default="", help="of its command line, without --api and port")
    webui.add_argument("--python-path", help="its PYTHONPATH, instead of this process's")
    webui.add_argument("--port", type=int, default=7864)
    webui.add_argument("--checkpoint", help="file name in models/Stable-diffusion")
    webui.add_argument("--lora", help="name of a LoRA in models/Lora")
    webui.add_argument("--soak", type=int, default=50, help="pictures at the end, of all sizes")
    webui.add_argument("--batch", type=int, default=1)
    webui.add_argument("--upscale", type=float, default=1, help="hires-fix to so many times a side")
    webui.add_argument("--backend", default="", help="of OneDiff's graphs")
    webui.add_argument("--work", type=Path, help="caches, logs and the host's own pictures")
    given = parser.parse_args()
    if given.one:
        return _draw(given)
    if given.host != HOSTS[0]:
        missing = [name for name in ("checkout", "work", "json") if getattr(given, name) is None]
        if missing:
            parser.error(f"a WebUI needs --{', --'.join(missing)}")
        given.contenders = given.contenders or ",".join(small_gpu_webui.CONTENDERS)
        return 0 if small_gpu_webui.measure(given) else 1
    if given.model not in MODELS:
        parser.error(f"--model is one of {', '.join(MODELS)}, not {given.model}")
    given.contenders = given.contenders or ",".join(CONTENDERS)
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        given.store = given.store or Path(folder)
        given.json = given.json or Path(folder) / "figures.json"
        failed = 0
        # Each in a process of its own: memory and its peak begin from nothing.
        for name in given.contenders.split(","):
            command = [sys.executable, "-m", "benchmarks.small_gpu", "--one", name]
            for option in ("gigabytes", "host", "offload", "model", "dtype", "sizes", "scale",
                           "steps", "pictures", "limit_s", "store", "json"):  # fmt: skip
                if getattr(given, option) is not None:
                    command += [f"--{option.replace('_', '-')}", str(getattr(given, option))]
            failed += subprocess.run([*command, *["--replace"] * given.replace]).returncode
            given.replace = False
        return min(failed, 1)


def _draw(given: argparse.Namespace) -> int:
    """Measure one contender."""
    from onediff_ext import compile_pipe
    from onediff_ext.hosts.diffusers.compile import compiled_state

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = given.dtype or ("fp16" if device.type == "cuda" else "fp32")
    figures: dict[str, Any] = {
        "what": "pictures under a memory limit", "model": given.model, "steps": given.steps,
        "gigabytes": given.gigabytes, "host": given.host, "offload": given.offload,
        "fingerprint": fingerprint(device), "rows": [],
    }  # fmt: skip
    old = None if given.replace else read_result(given.json)
    check_mergeable(old, figures, SETTINGS)
    pipe = make_pipeline(given.model, torch.device("cpu"), DTYPES[dtype])
    pipe.set_progress_bar_config(disable=True)
    if device.type == "cuda":
        limit_memory(given.gigabytes)
    else:
        given.offload = "none"
    OFFLOADS[given.offload](pipe)
    state = None
    if given.one == "ours":
        compile_pipe(pipe, options={"store": given.store})
        state = compiled_state(pipe)
    ends_at = time.monotonic() + given.limit_s
    sizes = [
        (s.width_px // given.scale // 8 * 8, s.height_px // given.scale // 8 * 8)
        for s in parse_sizes(given.sizes)
    ]
    rows = {size: _row(given.one, dtype, size) for size in sizes}
    for size in sizes:
        _picture(pipe, size, given.steps, device, rows[size], timed=False)
    if state is not None:
        state.session.wait_for_builds(max(1.0, ends_at - time.monotonic() - 60))
        _picture(pipe, sizes[0], given.steps, device, rows[sizes[0]], timed=False)
    for _ in range(given.pictures):
        for size in sizes:
            if time.monotonic() < ends_at:
                _picture(pipe, size, given.steps, device, rows[size], timed=True)
    for row in rows.values():
        if row["seconds"]:
            row["picture_s"] = statistics.median(row["seconds"])
        if state is not None:
            status, graphs = state.session.status(), state.session.cuda_graphs
            row |= {
                "blocks": f"{status.blocks_compiled} of {status.blocks_needed}",
                "reasons": list(status.reasons),
                "not_captured": [
                    c.captured.reason for c in state.components if c.captured is not None
                ],
                "cuda_graphs_made": graphs.made,
                "cuda_graphs_dropped": list(graphs.dropped)[-5:],
            }
        print({k: v for k, v in row.items() if k != "measured"}, flush=True)
    figures["rows"] = list(rows.values())
    write_result(given.json, merge(old, figures, same=SETTINGS))
    if state is not None:
        state.session.close()
    return 0


def _row(contender: str, dtype: str, size: tuple[int, int]) -> dict[str, Any]:
    return {
        "contender": contender, "dtype": dtype, "width": size[0], "height": size[1],
        "measured": now(), "seconds": [], "peak_reserved_bytes": 0, "out_of_memory": 0,
    }  # fmt: skip


def _picture(
    pipe: Any,
    size: tuple[int, int],
    steps: int,
    device: torch.device,
    row: dict[str, Any],
    *,
    timed: bool,
) -> None:
    """Draw one picture, and add its time and memory to a row."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    try:
        pipe(
            "a fox in the snow",
            width=size[0],
            height=size[1],
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(0),
        )
    except torch.OutOfMemoryError as exc:
        row["out_of_memory"] += 1
        print(f"{row['contender']} {size[0]}x{size[1]}: {str(exc).splitlines()[0]}", flush=True)
    else:
        synchronize(device)
        if timed:
            row["seconds"].append(round(time.perf_counter() - start, 3))
    if device.type == "cuda":
        row["peak_reserved_bytes"] = max(
            row["peak_reserved_bytes"], torch.cuda.max_memory_reserved()
        )


if __name__ == "__main__":
    sys.exit(main())

"""UNet steps of ours and of peers: ``python -m benchmarks.unet --model sdxl --json FILE``.

All contenders run the same weights in one process, in turn, size by size; parity with eager is
checked at each size before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.any_size import DTYPES, make_unet
from benchmarks.fingerprint import fingerprint
from benchmarks.timing import median_and_p95, step_times_ms
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import parse_sizes
from onediff_ext.engine.check import compare
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session
from onediff_ext.hosts.diffusers.probe import probe, unet_inputs

SIZES = (
    "512x512, 640x640, 720x720, 896x768, 960x720, 720x960, 768x1152, 832x1216, "
    "1024x1024, 1152x896, 1280x1280, 2048x512"
)


class Contender(ABC):
    """One way to run a UNet step."""

    name: str
    sizes: str | None = None  # only these, when each one takes a minute to compile

    @abstractmethod
    def make(self, unet: Any, store: Path) -> Callable[..., Any]:
        """A callable that takes the UNet's arguments. `unet` shares its weights with others."""

    def figures(self) -> dict[str, Any]:
        """What else is worth keeping: graphs built, captures."""
        return {}


class Eager(Contender):
    name = "eager"

    def make(self, unet: Any, store: Path) -> Callable[..., Any]:
        return unet


class Ours(Contender):
    """Graphs of blocks, captures, or both."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self._options = name, options

    def make(self, unet: Any, store: Path) -> Callable[..., Any]:
        self.session = new_session(CompileOptions(store=store, **self._options))
        pipe = SimpleNamespace(unet=unet)
        start = time.perf_counter()
        compile_pipe(pipe, session=self.session)
        probe(pipe)
        self._ready_s = time.perf_counter() - start
        probe(pipe)
        return unet

    def figures(self) -> dict[str, Any]:
        return {
            "ready_s": self._ready_s,
            "kinds": len(self.session.kinds),
            "built": self.session.count("built"),
            "loaded": self.session.count("loaded"),
            "captures": self.session.captures.made,
            "dropped": list(self.session.captures.dropped),
            "states": sorted({kind.state.value for kind in self.session.kinds}),
            "fallbacks": [vars(f) for f in self.session.fallbacks()],
        }


class Compiled(Contender):
    """`torch.compile` of the whole UNet."""

    def __init__(self, name: str, sizes: str | None = None, **arguments: Any) -> None:
        self.name, self.sizes, self._arguments = name, sizes, arguments

    def make(self, unet: Any, store: Path) -> Callable[..., Any]:
        compiled = torch.compile(unet, **self._arguments)

        def step(**inputs: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(**inputs)

        return step


class RepeatedBlocks(Contender):
    """diffusers' own regional compilation."""

    name = "compile_repeated_blocks"

    def make(self, unet: Any, store: Path) -> Callable[..., Any]:
        unet.compile_repeated_blocks(dynamic=True)
        return unet


def contenders(names: str, peer_sizes: str) -> list[Contender]:
    """All contenders whose name is among `names` (comma-separated, "all" for all)."""
    known: list[Contender] = [
        Eager(),
        Ours("ours-captured-eager", build="never"),
        Ours("ours-graphs", build="wait", captures=False),
        Ours("ours-exact", build="wait"),
        RepeatedBlocks(),
        Compiled("torch.compile", peer_sizes),
        Compiled("torch.compile reduce-overhead", peer_sizes, mode="reduce-overhead"),
        Compiled("torch.compile max-autotune", peer_sizes, mode="max-autotune"),
        Compiled("torch.compile dynamic", dynamic=True),
    ]
    if names == "all":
        return known
    chosen = names.split(",")
    return [contender for contender in known if contender.name in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("small", "sd1", "sd2", "sdxl"), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default=None)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--peer-sizes", default="1024x1024, 512x512")
    parser.add_argument("--contenders", default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="in each round")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--profile", type=Path, help="file for tables of GPU kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        arguments.store = arguments.store or Path(folder) / "store"
        figures = run(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all contenders at all sizes."""
    device = torch.device(arguments.device)
    dtype = DTYPES[arguments.dtype or ("fp16" if device.type == "cuda" else "fp32")]
    unet = make_unet(arguments.model, device, dtype).to(memory_format=torch.channels_last)
    figures: dict[str, Any] = {
        "what": "UNet step, CFG batch 2",
        "model": arguments.model,
        "dtype": str(dtype).removeprefix("torch."),
        "fingerprint": fingerprint(device),
        "timing": "consecutive steps, times between events in the GPU's stream",
        "rows": [],
        "contenders": {},
    }
    chosen = contenders(arguments.contenders, arguments.peer_sizes)
    steps: dict[str, Callable[..., Any]] = {}
    with torch.no_grad():
        for contender in chosen:
            start = time.perf_counter()
            steps[contender.name] = contender.make(twin(unet), arguments.store)
            print(f"{contender.name}: made in {time.perf_counter() - start:.1f} s", flush=True)
        for size in parse_sizes(arguments.sizes):
            at_size = [c for c in chosen if c.sizes is None or size in parse_sizes(c.sizes)]
            _measure_size(arguments, unet, at_size, steps, size, device, figures)
        if arguments.profile is not None:
            _profile(arguments, unet, steps, device)
    figures["contenders"] = {c.name: c.figures() for c in chosen}
    return figures


def twin(module: Any) -> Any:
    """A copy of a module that shares every tensor with it."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(t): t for t in tensors})


def _measure_size(
    arguments: argparse.Namespace,
    unet: Any,
    contenders: list[Contender],
    steps: dict[str, Callable[..., Any]],
    size: Any,
    device: torch.device,
    figures: dict[str, Any],
) -> None:
    inputs = inputs_at(unet, size)
    expected = unet(**inputs).sample
    first, errors, peaks, failed = {}, {}, {}, {}
    for contender in contenders:
        step = steps[contender.name]
        _reset_peak(device)
        try:
            start = time.perf_counter()
            found = step(**inputs).sample.clone()
            _synchronize(device)
            first[contender.name] = time.perf_counter() - start
            errors[contender.name] = compare(found, expected).error
            for _ in range(4):  # a size is captured at its second step and checked at its third
                found = step(**inputs).sample.clone()
            errors[contender.name] = max(errors[contender.name], compare(found, expected).error)
            peaks[contender.name] = _peak(device)
        except Exception as exc:
            failed[contender.name] = f"{type(exc).__name__}: {str(exc)[:300]}"
            print(f"{contender.name} at {size}: {failed[contender.name]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in errors}
    for _ in range(arguments.rounds):
        for name in times:
            step = steps[name]
            times[name] += step_times_ms(lambda: step(**inputs), arguments.steps, device)  # noqa: B023
    for name, measured in times.items():
        median, p95 = median_and_p95(measured)
        figures["rows"].append({
            "contender": name, "dtype": figures["dtype"],
            "width": size.width_px, "height": size.height_px,
            "first_s": first[name], "ms_median": median, "ms_p95": p95,
            "peak_bytes": peaks[name], "error_vs_eager": errors[name],
        })  # fmt: skip
        print(f"{size!s:>10} {name:32} {median:8.2f} ms  p95 {p95:8.2f}  first {first[name]:6.2f} s"
              f"  error {errors[name]:.1e}", flush=True)  # fmt: skip
    for name, reason in failed.items():
        figures["rows"].append({
            "contender": name, "dtype": figures["dtype"],
            "width": size.width_px, "height": size.height_px, "failed": reason,
        })  # fmt: skip


def inputs_at(unet: Any, size: Any) -> dict[str, Any]:
    """Noise for one step with CFG."""
    return unet_inputs(
        unet, torch.Generator().manual_seed(1), batch=2 * size.batch,
        height_latent=size.height_px // 8, width_latent=size.width_px // 8,
    )  # fmt: skip


def _profile(
    arguments: argparse.Namespace,
    unet: Any,
    steps: dict[str, Callable[..., Any]],
    device: torch.device,
) -> None:
    from torch.profiler import ProfilerActivity, profile

    tables = []
    for name, step in steps.items():
        for size in parse_sizes("1024x1024, 512x512"):
            inputs = inputs_at(unet, size)
            for _ in range(3):
                step(**inputs)
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                for _ in range(3):
                    step(**inputs)
                _synchronize(device)
            table = seen.key_averages().table(
                sort_by="self_cuda_time_total", row_limit=80, max_name_column_width=110
            )
            tables.append(f"{name} at {size}\n{table}")
    arguments.profile.write_text("\n\n".join(tables), encoding="utf-8")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    raise SystemExit(main())

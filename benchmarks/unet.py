"""UNet steps of ours and of peers: ``python -m benchmarks.unet --model sdxl --json FILE``.

All contenders run the same weights; parity with eager is checked at each size before anything
is timed. Ours and eager run in one process, in turn. Each peer has a process of its own, where
it takes turns with eager again (``eager_ms``), and a time limit; what it had measured by then
is kept. Peers that compile for one size take minutes for each: they run at ``--peer-sizes`` only.
Rows are added to those that the JSON file has from the same machine. With ``--like-a1111`` all run
as that host has them: under autocast, with weights in the order in which they are loaded (NCHW).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Contender, Eager, Step, chosen_contenders
from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES, make_unet, twin
from benchmarks.results import check_mergeable, merge, now, read_result, write_result
from benchmarks.streams import gather
from benchmarks.timing import median_and_p95, peak_bytes, reset_peak, step_times_ms, synchronize
from onediff_ext.core.shapes import BatchShape, parse_sizes
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.hosts.diffusers.probe import unet_inputs

SIZES = (
    "512x512, 640x640, 720x720, 896x768, 960x720, 720x960, 768x1152, 832x1216, "
    "1024x1024, 1152x896, 1280x1280, 2048x512"
)
_SUFFIXES = {"fp16": "", "fp32": "", "bf16": " bf16"}  # of names under "contenders"
PEER_SIZES = "1024x1024, 512x512, 960x720"
LIKE_A1111 = ", as in A1111: under autocast, weights in NCHW"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "small", "sd1", "sd2", "sdxl"), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default=None)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--peer-sizes", default=PEER_SIZES, help="of peers that are compiled anew")
    parser.add_argument("--like-a1111", action="store_true", help="autocast, weights in NCHW")
    parser.add_argument("--contenders", default="ours", help="all, ours, peers, or names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="in each round")
    parser.add_argument("--limit-s", type=float, default=500, help="for each process")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--profile", type=Path, help="file for tables of GPU kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replace", action="store_true", help="forget what is in the JSON file")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--stream", type=Path, help=argparse.SUPPRESS)  # a process of `Run`
    arguments = parser.parse_args()
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    if arguments.dtype is None:
        arguments.dtype = "fp16" if arguments.device.startswith("cuda") else "fp32"
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        arguments.store = arguments.store or Path(folder) / "store"
        if arguments.stream is not None:
            with arguments.stream.open("a", encoding="utf-8", buffering=1) as stream:
                Measurement(arguments, stream).run()
        else:
            Run(arguments, Path(folder)).run()
    return 0


class Run:
    """One call of the benchmark: a process for eager and ours, one for each peer."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._head = {
            "what": "UNet step, CFG batch 2" + (LIKE_A1111 if arguments.like_a1111 else ""),
            "model": arguments.model,
            "fingerprint": fingerprint(torch.device(arguments.device)),
            "timing": "consecutive steps, times between events in the GPU's stream",
        }
        path = arguments.json
        self._figures = None if path is None or arguments.replace else read_result(path)
        check_mergeable(self._figures, self._head)
        if self._figures is not None:
            self._figures.pop("dtype", None)  # rows have theirs

    def run(self) -> None:
        """Measure; the file is written after each process."""
        chosen = chosen_contenders(self._arguments.contenders)
        groups = [[c] for c in chosen if c.is_peer]
        together = [c for c in chosen if not c.is_peer]
        for group in [together, *groups] if together else groups:
            missing = group[0].missing()
            if missing:
                print(f"{group[0].name}: not installed, {missing}", flush=True)
                new = {"rows": [], "contenders": {group[0].name: {"not_installed": missing}}}
            else:
                new = self._measure(group)
            self._figures = merge(self._figures, {**self._head, **new})
            if self._arguments.json is not None:
                write_result(self._arguments.json, self._figures)

    def _measure(self, group: list[Contender]) -> dict[str, Any]:
        """Run a group in a process of its own, which is stopped at the time limit."""
        given = self._arguments
        stream = self._folder / f"{group[0].name.replace(' ', '-')}.jsonl"
        stream.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "benchmarks.unet", "--stream", str(stream),
            "--contenders", ",".join(c.name for c in group), "--store", str(given.store),
        ]  # fmt: skip
        for name in ("model", "device", "dtype", "sizes", "peer_sizes", "rounds", "steps"):
            command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
        command += ["--profile", str(given.profile)] if given.profile else []
        command += ["--verbose"] if given.verbose else []
        command += ["--like-a1111"] if given.like_a1111 else []
        caches = self._folder / f"caches-{group[0].name.replace(' ', '-')}"  # first_s is of none
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            status = child.wait(given.limit_s)
            end = "" if status == 0 else f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            end = f"stopped at the time limit of {given.limit_s:g} s"
        finally:
            if child.poll() is None:  # its compilers go with it
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        dtype = str(DTYPES[given.dtype]).removeprefix("torch.")
        return gather(stream, end, [c.name for c in group], dtype, _SUFFIXES[given.dtype])


class Measurement:
    """What one process does; it writes each figure down as soon as it has it."""

    def __init__(self, arguments: argparse.Namespace, stream: Any) -> None:
        self._arguments, self._stream = arguments, stream
        self._device = torch.device(arguments.device)
        self._dtype = DTYPES[arguments.dtype]
        self._chosen = chosen_contenders(
            arguments.contenders, channels_last=not arguments.like_a1111
        )
        self._reported = [c.name for c in self._chosen]
        if not any(isinstance(c, Eager) for c in self._chosen):
            self._chosen.insert(0, Eager())  # beside a peer, to see that the machine is the same

    def run(self) -> None:
        """Measure all contenders at all sizes."""
        given, device = self._arguments, self._device
        unet = make_unet(given.model, device, self._dtype)
        if not given.like_a1111:
            unet = unet.to(memory_format=torch.channels_last)
        steps: dict[str, Step] = {}
        sizes = parse_sizes(given.sizes)
        if all(c.static or isinstance(c, Eager) for c in self._chosen) and len(self._chosen) > 1:
            sizes = parse_sizes(given.peer_sizes)
        autocast = torch.autocast(device.type, self._dtype, enabled=given.like_a1111)
        with torch.no_grad(), autocast:
            for contender in self._chosen:
                start = time.perf_counter()
                steps[contender.name] = contender.make(twin(unet), given.store)
                seconds = time.perf_counter() - start
                print(f"{contender.name}: made in {seconds:.1f} s", flush=True)
            for size in sizes:
                self._size(unet, steps, size)
            if given.profile is not None:
                _profile(given.profile, unet, steps, device)
        for contender in self._chosen:
            if contender.name in self._reported:
                found = {**contender.figures(), "measured": now()}
                name = f"{contender.name}{_SUFFIXES[given.dtype]}"
                self._write({"contenders": {name: found}})

    def _size(self, unet: Any, steps: dict[str, Step], size: BatchShape) -> None:
        where = {"width": size.width_px, "height": size.height_px}
        self._write({"begun": where})
        device = self._device
        inputs = inputs_at(unet, size)
        expected = unet(**inputs).sample.clone()
        rows: dict[str, dict[str, Any]] = {}
        for name, step in steps.items():
            row = rows[name] = {
                "contender": name, "dtype": str(self._dtype).removeprefix("torch."), **where,
            }  # fmt: skip
            reset_peak(device)
            try:
                start = time.perf_counter()
                found = step(**inputs).sample.clone()
                synchronize(device)
                row["first_s"] = time.perf_counter() - start
                error = compare(found, expected).error
                for _ in range(4):  # a size is captured at its second step, checked at its third
                    found = step(**inputs).sample.clone()
                row["error_vs_eager"] = max(error, compare(found, expected).error)
                row["peak_bytes"] = peak_bytes(device)
            except Exception as exc:
                row["failed"] = f"{type(exc).__name__}: {str(exc)[:300]}"
                print(f"{name} at {size}: {row['failed']}", flush=True)
        times: dict[str, list[float]] = {n: [] for n, row in rows.items() if "failed" not in row}
        for _ in range(self._arguments.rounds):
            for name in times:
                step = steps[name]
                times[name] += step_times_ms(
                    lambda: step(**inputs),  # noqa: B023
                    self._arguments.steps,
                    device,
                )
        for name, measured in times.items():
            rows[name]["ms_median"], rows[name]["ms_p95"] = median_and_p95(measured)
        for name in self._reported:
            row = rows[name]
            if name != "eager":
                row["eager_ms"] = rows["eager"].get("ms_median")
            self._write({"row": row})
            if "failed" not in row:
                print(f"{size!s:>10} {name:32} {row['ms_median']:8.2f} ms"
                      f"  p95 {row['ms_p95']:8.2f}  first {row['first_s']:6.2f} s"
                      f"  error {row['error_vs_eager']:.1e}", flush=True)  # fmt: skip

    def _write(self, entry: dict[str, Any]) -> None:
        self._stream.write(json.dumps(entry) + "\n")


def inputs_at(unet: Any, size: BatchShape) -> dict[str, Any]:
    """Noise for one step with CFG."""
    return unet_inputs(
        unet, torch.Generator().manual_seed(1), batch=2 * size.batch,
        height_latent=size.height_px // 8, width_latent=size.width_px // 8,
    )  # fmt: skip


def _profile(path: Path, unet: Any, steps: dict[str, Step], device: torch.device) -> None:
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
                synchronize(device)
            table = seen.key_averages().table(
                sort_by="self_cuda_time_total", row_limit=80, max_name_column_width=110
            )
            tables.append(f"{name} at {size}\n{table}")
    path.write_text("\n\n".join(tables), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())

"""One forward of a denoiser by several contenders, at several sizes: `unet` and `dit` use it.

All contenders run the same weights. Parity with eager is checked at each size before timing. Ours
and eager run in one process, in turn. Each peer has a separate process, where it takes turns with
eager again (``eager_ms``), and a time limit; figures up to the limit are kept. Peers that compile
for one size take minutes for each, so they run only at ``--peer-sizes``. Rows are merged into the
JSON file of the same machine.
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
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Contender, Eager, Step, choose
from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES, twin
from benchmarks.results import check_mergeable, merge, now, read_result, write_result
from benchmarks.streams import gather
from benchmarks.timing import median_and_p95, peak_bytes, reset_peak, step_times_ms, synchronize
from onediff_ext.core.shapes import BatchShape, parse_sizes
from onediff_ext.engine.checking.compare_with_eager import compare


class Subject(ABC):
    """A family of models, and how they are called.

    Attributes:
        command: The module that measures it.
        models: Names for ``--model``; the first is the default.
        sizes, peer_sizes: Sizes in pixels, separated by commas.
        cuda_dtype: The default for a GPU.
        what: What a row measures, in a few words.

    Args:
        given: The command's arguments.
    """

    command: str
    models: tuple[str, ...]
    sizes: str
    peer_sizes: str
    cuda_dtype: str
    what: str

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given

    def passed_on(self) -> list[str]:
        """Return options of its own for a process of the same command."""
        return []

    @abstractmethod
    def contenders(self) -> list[Contender]:
        """Return all contenders in the order of measurement."""

    @abstractmethod
    def make(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the model, with random weights."""

    @abstractmethod
    def inputs(self, model: Any, size: BatchShape) -> dict[str, Any]:
        """Return noise inputs for one step with guidance."""

    def around(self) -> AbstractContextManager[Any]:
        """Return a context for all forwards."""
        return nullcontext()

    def suffix(self, dtype: str) -> str:
        """Return what follows the names under "contenders" for a dtype, such as " bf16"."""
        return "" if dtype in (self.cuda_dtype, "fp32") else f" {dtype}"


def parser_of(subject: type[Subject], doc: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all subjects have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model", choices=subject.models, default=subject.models[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default=None)
    parser.add_argument("--sizes", default=subject.sizes)
    parser.add_argument(
        "--peer-sizes", default=subject.peer_sizes, help="of peers that compile for each size"
    )
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
    return parser


def main(of: type[Subject], arguments: argparse.Namespace) -> int:
    """Run a subject's command with parsed arguments; return the exit status."""
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    if arguments.dtype is None:
        arguments.dtype = of.cuda_dtype if arguments.device.startswith("cuda") else "fp32"
    subject = of(arguments)
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        arguments.store = arguments.store or Path(folder) / "store"
        if arguments.stream is not None:
            with arguments.stream.open("a", encoding="utf-8", buffering=1) as stream:
                Measurement(subject, arguments, stream).run()
        else:
            Run(subject, arguments, Path(folder)).run()
    return 0


class Run:
    """One call of the benchmark: a process for eager and ours, one for each peer."""

    def __init__(self, subject: Subject, arguments: argparse.Namespace, folder: Path) -> None:
        self._subject, self._arguments, self._folder = subject, arguments, folder
        self._head = {
            "what": subject.what,
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
        """Measure all contenders; write the file after each process."""
        given = self._arguments
        chosen = choose(given.contenders, self._subject.contenders())
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
            if given.json is not None:
                write_result(given.json, self._figures)

    def _measure(self, group: list[Contender]) -> dict[str, Any]:
        """Run a group in a separate process with the time limit."""
        given = self._arguments
        stream = self._folder / f"{group[0].name.replace(' ', '-')}.jsonl"
        stream.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", self._subject.command, "--stream", str(stream),
            "--contenders", ",".join(c.name for c in group), "--store", str(given.store),
        ]  # fmt: skip
        for name in ("model", "device", "dtype", "sizes", "peer_sizes", "rounds", "steps"):
            command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
        command += ["--profile", str(given.profile)] if given.profile else []
        command += ["--verbose"] if given.verbose else []
        command += self._subject.passed_on()
        caches = (
            self._folder / f"caches-{group[0].name.replace(' ', '-')}"
        )  # empty caches, for first_s
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
            if child.poll() is None:  # with its compiler processes
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        dtype = str(DTYPES[given.dtype]).removeprefix("torch.")
        return gather(
            stream, end, [c.name for c in group], dtype, self._subject.suffix(given.dtype)
        )


class Measurement:
    """The measurements of one process; each figure is written as soon as it is known."""

    def __init__(self, subject: Subject, arguments: argparse.Namespace, stream: Any) -> None:
        self._subject, self._arguments, self._stream = subject, arguments, stream
        self._device = torch.device(arguments.device)
        self._dtype = DTYPES[arguments.dtype]
        self._chosen = choose(arguments.contenders, subject.contenders())
        self._reported = [c.name for c in self._chosen]
        if not any(isinstance(c, Eager) for c in self._chosen):
            self._chosen.insert(0, Eager())  # shows that the machine is the same

    def run(self) -> None:
        """Measure all contenders at all sizes."""
        given, device = self._arguments, self._device
        model = self._subject.make(device, self._dtype)
        steps: dict[str, Step] = {}
        sizes = parse_sizes(given.sizes)
        if all(c.static or isinstance(c, Eager) for c in self._chosen) and len(self._chosen) > 1:
            sizes = parse_sizes(given.peer_sizes)
        with torch.no_grad(), self._subject.around():
            for contender in self._chosen:
                start = time.perf_counter()
                steps[contender.name] = contender.make(twin(model), given.store)
                seconds = time.perf_counter() - start
                print(f"{contender.name}: made in {seconds:.1f} s", flush=True)
            for size in sizes:
                self._size(model, steps, size)
            if given.profile is not None:
                self._profile(given.profile, model, steps)
        for contender in self._chosen:
            if contender.name in self._reported:
                found = {**contender.figures(), "measured": now()}
                name = f"{contender.name}{self._subject.suffix(given.dtype)}"
                self._write({"contenders": {name: found}})

    def _size(self, model: Any, steps: dict[str, Step], size: BatchShape) -> None:
        where = {"width": size.width_px, "height": size.height_px}
        self._write({"begun": where})
        device = self._device
        inputs = self._subject.inputs(model, size)
        expected = sample_of(model(**inputs)).clone()
        rows: dict[str, dict[str, Any]] = {}
        for name, step in steps.items():
            row = rows[name] = {
                "contender": name, "dtype": str(self._dtype).removeprefix("torch."), **where,
            }  # fmt: skip
            reset_peak(device)
            try:
                start = time.perf_counter()
                found = sample_of(step(**inputs)).clone()
                synchronize(device)
                row["first_s"] = time.perf_counter() - start
                error = compare(found, expected).error
                for _ in range(4):  # a size is captured at its second step, checked at its third
                    found = sample_of(step(**inputs)).clone()
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

    def _profile(self, path: Path, model: Any, steps: dict[str, Step]) -> None:
        from torch.profiler import ProfilerActivity, profile

        tables = []
        for name, step in steps.items():
            for size in parse_sizes("1024x1024, 512x512"):
                inputs = self._subject.inputs(model, size)
                for _ in range(3):
                    step(**inputs)
                with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                    for _ in range(3):
                        step(**inputs)
                    synchronize(self._device)
                table = seen.key_averages().table(
                    sort_by="self_cuda_time_total", row_limit=80, max_name_column_width=110
                )
                tables.append(f"{name} at {size}\n{table}")
        path.write_text("\n\n".join(tables), encoding="utf-8")


def sample_of(output: Any) -> torch.Tensor:
    """Return a denoiser's output as one tensor; some models return one for each picture."""
    sample = output.sample
    return torch.stack(sample) if isinstance(sample, list) else sample

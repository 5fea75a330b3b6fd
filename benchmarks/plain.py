"""A user's script, timed from outside: ``python -m benchmarks.plain --model sdxl --json FILE``.

`plain_script.py`, which is also the README's example, draws pictures with a model folder of full
width and random weights. Each contender is that script with one line changed:

- eager: without `compile_pipe`;
- plain: as it is;
- plain-fp8: ``compile_pipe(pipe, options={"precision": "fp8"})``;
- plain-lora: a LoRA is loaded before `compile_pipe`, for eager too (eager-lora);
- loop: a UNet that returns its input, so that only the pipeline's own work remains, such as the
  scheduler's. Chosen by name alone.

Nothing in the script waits for a graph or says where a picture begins. Times are those of the
files that it writes. It runs once with an empty store, which draws one size without a pause while
graphs are built, and then once over all sizes, with the filled store. There, pictures of few and
of many steps take turns. The median of their differences is the time of the steps, the scheduler's
included, without text encoder, VAE and PNG. Turns keep a GPU's changing clock out of it, which two
processes, one with few and one with many steps, do not.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.pictures import compare_pictures, picture_times
from benchmarks.results import check_mergeable, merge, now, read_result, write_result
from benchmarks.unet import SIZES

SCRIPT = Path(__file__).with_name("plain_script.py")
COMPILE = "pipe = compile_pipe(pipe)"
LORA = 'pipe.load_lora_weights(f"{model}/lora.safetensors")'
CONTENDERS = {
    "eager": "",
    "plain": COMPILE,
    "plain-fp8": 'pipe = compile_pipe(pipe, options={"precision": "fp8"})',
    "eager-lora": LORA,
    "plain-lora": f"{LORA}\n{COMPILE}",
    "loop": "pipe.unet.forward = lambda sample, *args, **kwargs: (sample,)",
}
DEFAULT = tuple(name for name in CONTENDERS if name != "loop")
SETTINGS = ("what", "model", "dtype", "steps")
STEPS = "int(steps)"
_LOG = "events.txt"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "small", "sd1", "sdxl"), default="tiny")
    parser.add_argument("--contenders", default=",".join(DEFAULT))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--scale", type=int, default=1, help="divide sizes by it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--more-steps", type=int, default=40,
        help="of a long picture of 1024x1024; smaller ones have up to four times as many",
    )  # fmt: skip
    parser.add_argument("--pictures", type=int, default=3, help="timed pairs of each size")
    parser.add_argument("--first-pictures", type=int, default=100, help="with the empty store")
    parser.add_argument("--work", type=Path, help="model and stores; kept for later runs")
    parser.add_argument("--limit-s", type=float, default=580, help="for each process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replace", action="store_true", help="forget what is in the JSON file")
    parser.add_argument("--make-model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run-script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make_model:
        return _make_model(arguments.model, arguments.make_model)
    if arguments.run_script:
        return _run_script(arguments.run_script)
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        arguments.work = (arguments.work or Path(folder)).resolve()
        Run(arguments).all_contenders()
    return 0


class Run:
    """One call of the benchmark."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from benchmarks.fingerprint import fingerprint
        from onediff_ext.core.shapes import parse_sizes

        self._given, self._work = arguments, arguments.work
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._sizes = [
            (size.width_px // arguments.scale // 8 * 8, size.height_px // arguments.scale // 8 * 8)
            for size in parse_sizes(arguments.sizes)
        ]
        self._figures: dict[str, Any] = {
            "what": "a user's script, timed from outside",
            "model": arguments.model,
            "dtype": "float16" if device.type == "cuda" else "float32",
            "steps": arguments.steps,
            "fingerprint": fingerprint(device),
            "rows": [],
            "contenders": {},
        }
        keep = arguments.json is not None and not arguments.replace
        self._old = read_result(arguments.json) if keep else None
        check_mergeable(self._old, self._figures, SETTINGS)

    def all_contenders(self) -> None:
        """Measure the chosen contenders in order, and write the figures after each."""
        model = self._work / "model"
        if not model.exists():
            self._process(["--make-model", str(model), "--model", self._given.model])
        for name in self._given.contenders.split(","):
            if name not in CONTENDERS:
                raise SystemExit(f"No such contender: {name}. Known: {', '.join(CONTENDERS)}.")
            first, rows = self._first_pictures(name), self._rows(name)
            new = {"contenders": {name: {**first, **self._parity(name)}}, "rows": rows}
            self._figures = merge(self._figures, {**self._figures, **new}, same=SETTINGS)
            if self._given.json is not None:
                merged = merge(self._old, self._figures, same=SETTINGS)
                write_result(self._given.json, merged)

    def _first_pictures(self, name: str) -> dict[str, Any]:
        """Draw one size without a pause, with an empty store."""
        count = self._given.first_pictures if name.startswith("plain") else 4
        started, times = self._draw(name, "first", self._given.steps, self._sizes[:1] * count)
        seconds = [b - a for (_, a), (_, b) in itertools.pairwise(times)]
        usual_s = statistics.median(seconds)
        events = (self._work / name / "first" / _LOG).read_text(encoding="utf-8").splitlines()
        in_use = [float(line.split()[0]) - started for line in events if " built: " in line]
        found = {
            "measured": now(),
            "first_picture_s": times[0][1],
            "usual_picture_s": usual_s,
            "slowest_later_picture_s": max(seconds),
            "last_picture_s": seconds[-1],
            "later_pictures_s": [round(each, 3) for each in seconds],
            "graphs_built": len(in_use),
            # After the first plain call, which ends with the first file.
            "all_built_s": max(in_use) - times[0][1] + usual_s if in_use else None,
        }
        shown = {what: value for what, value in found.items() if what != "later_pictures_s"}
        print(f"{name}: {shown}", flush=True)
        return found

    def _rows(self, name: str) -> list[dict[str, Any]]:
        """Draw all sizes with the filled store: one picture, then short and long ones in turns."""
        steps, pairs = self._given.steps, self._given.pictures
        sizes = [size for size in self._sizes for _ in range(1 + 2 * pairs)]
        more = [self._more_steps(size) for size in self._sizes]
        counts = [n for each in more for n in (steps, *(steps, steps + each) * pairs)]
        _, times = self._draw(name, self._rows_run, counts, sizes)
        taken = [b - a for a, b in itertools.pairwise([0.0, *(seconds for _, seconds in times)])]
        rows = []
        for number, (size, each) in enumerate(zip(self._sizes, more, strict=True)):
            of_size = taken[number * (1 + 2 * pairs) :][: 1 + 2 * pairs]
            short, long = of_size[1::2], of_size[2::2]
            ms = [1e3 * (b - a) / each for a, b in zip(short, long, strict=True)]
            picture_s = statistics.median(short)
            rows.append({
                "contender": name, "dtype": self._figures["dtype"], "measured": now(),
                "width": size[0], "height": size[1], "first_s": of_size[0], "picture_s": picture_s,
                "more_steps": each, "ms_median": statistics.median(ms),
                "ms_of_pairs": [round(one, 3) for one in ms],
            })  # fmt: skip
            print(
                f"{size[0]}x{size[1]} {name:12} {picture_s:7.2f} s"
                f" {rows[-1]['ms_median']:8.2f} ms a step"
            )
        return rows

    @property
    def _rows_run(self) -> str:
        """The folder of a contender's pictures of all sizes: only equal steps are compared."""
        return f"{self._given.steps} steps and {self._given.more_steps} more"

    def _more_steps(self, size: tuple[int, int]) -> int:
        """Return the further steps of a size's long pictures: about the same time for each size."""
        more: int = self._given.more_steps
        return max(1, round(more * min(4.0, 1024**2 / (size[0] * size[1]))))

    def _parity(self, name: str) -> dict[str, Any]:
        """Compare a contender's pictures with eager's, if both have been drawn."""
        if name == "loop":
            return {}
        run = self._rows_run
        eager = self._work / ("eager-lora" if name.endswith("-lora") else "eager") / run
        return (
            {"parity": compare_pictures(eager, self._work / name / run)} if eager.exists() else {}
        )

    def _draw(
        self, name: str, run: str, steps: int | list[int], sizes: list[tuple[int, int]]
    ) -> tuple[float, list[tuple[str, float]]]:
        """Run a contender's script; return when it started, and the times of its files.

        Args:
            name: Of the contender.
            run: Names the folder.
            steps: Of all pictures, or of each.
            sizes: Width and height of each picture, in pixels.
        """
        folder = self._work / name / run
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.png"):
            old.unlink()
        script = folder / "script.py"
        script.write_text(script_of(name, steps), encoding="utf-8")
        texts = [f"{width}x{height}" for width, height in sizes]
        first = steps if isinstance(steps, int) else steps[0]
        started = time.time()
        self._process(
            ["--run-script", str(script), str(self._work / "model"), str(first), *texts], folder,
            ONEDIFF_STORE=str(self._work / name / "store"),
        )  # fmt: skip
        times = picture_times(folder, started)
        if len(times) != len(sizes):
            raise SystemExit(f"{name} drew {len(times)} of {len(sizes)} pictures.")
        return started, times

    def _process(self, arguments: list[str], folder: Path | None = None, **variables: str) -> None:
        """Run this module in another process."""
        root = Path(__file__).resolve().parent.parent
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **variables}
        command = [sys.executable, "-m", "benchmarks.plain", *arguments]
        subprocess.run(
            command, cwd=folder, env=environment, timeout=self._given.limit_s, check=True
        )


def script_of(name: str, steps: int | list[int] = 0) -> str:
    """Return a contender's script: the user's, with another line in place of `COMPILE`.

    Args:
        name: Of the contender.
        steps: Where a list, each picture has its own number of steps instead of the script's.
    """
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count(f"\n{COMPILE}  #") == text.count(STEPS) == 1
    text = text.replace(f"\n{COMPILE}  #", f"\n{CONTENDERS[name]}  #")
    return text if isinstance(steps, int) else text.replace(STEPS, f"{steps}[number]")


def _run_script(command: list[str]) -> int:
    """Run a script, and write what OneDiff logs to a file beside its pictures."""
    logging.basicConfig(filename=_LOG, filemode="w", format="%(created).3f %(message)s")
    logging.getLogger("onediff_ext").setLevel(logging.INFO)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    return 0


def _make_model(model: str, folder: Path) -> int:
    """Write a model folder, with a LoRA in it, in a process of its own."""
    import torch

    from benchmarks.models import make_pipeline
    from tests.support.adapter_weights import save_lora

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    pipe = make_pipeline(model, device, dtype)
    pipe.save_pretrained(folder, safe_serialization=True)
    save_lora(pipe, folder / "lora.safetensors", text=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Pictures per minute from the command line: ``python -m benchmarks.pipeline --json FILE``.

48 pictures of 12 sizes go through image to image to PNG files: 20 UNet steps each (40 steps at
strength 0.5), with classifier-free guidance, from a model folder of full width with random weights.
Each contender is a new process, timed from start to end with imports and loading of the model:

- eager: diffusers' own pipeline (`benchmarks.pipeline_eager`), channels last;
- ours-empty-store: ``onediff-ext img2img`` with an empty store; graphs build in the background;
- ours-filled-store: the same command with the store that ``onediff-ext warmup`` filled;
- plain: eager's script with a call of `compile_pipe`, and that store.

A contender gets a ratio only if its pictures match eager's. Stages can run in one command or in
several with the same work folder; figures of several runs are merged into one JSON file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.pictures import (
    compare_pictures,
    make_inputs,
    picture_times,
    size_rows,
    start_up_s,
)
from benchmarks.results import check_mergeable, merge, now, read_result, write_result

SIZES = (
    "512x512, 640x640, 720x720, 896x768, 960x720, 720x960, 768x1152, 832x1216, "
    "1024x1024, 1152x896, 1280x1280, 2048x512"
)
STAGES = ("prepare", "eager", "empty", "fill", "filled", "plain")
READ_BEFORE = (
    "torch.export",
    "torch._inductor.compile_fx",
    "torch._inductor.standalone_compile",
    "onediff_ext.cli.img2img",
    "onediff_ext.hosts.diffusers.jobs.run_img2img",
)
CONTENDERS = {
    "eager": "eager",
    "empty": "ours-empty-store",
    "filled": "ours-filled-store",
    "plain": "plain",
}
STEPS, STRENGTH, GUIDANCE, SEED = 40, 0.5, 7.0, 0
PROMPT, NEGATIVE_PROMPT = "a painting of a quiet harbour at dawn", "blurry, low quality"
DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Rounding alone leaves 55 dB in fp16 and 41 dB in bf16 after 12 steps of guidance 7 (small models,
# the same weights in float32); a UNet that predicts nothing, 14 dB.
ALLOWED_PSNR_DB = 35.0
NEEDED_CONTRAST_LEVELS = 10  # with less contrast, every comparison would pass
SETTINGS = ("what", "model", "dtype", "steps", "strength", "batch_size", "pictures", "upcast_vae")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "small", "sd15", "sdxl"), default="tiny")
    parser.add_argument("--device", default=None, help="cuda where there is one")
    parser.add_argument("--dtype", choices=tuple(DTYPE_NAMES), default=None)
    parser.add_argument(
        "--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)}; none: only judge"
    )
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--scale", type=int, default=1, help="divide sizes by it")
    parser.add_argument("--pictures", type=int, default=4, help="of each size")
    parser.add_argument("--batch-size", type=int, default=1, help="pictures at once, of all alike")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--strength", type=float, default=STRENGTH)
    parser.add_argument(
        "--no-upcast", action="store_true", help="a VAE that does without fp32, as SDXL's fp16-fix"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of the stages after prepare")
    parser.add_argument("--work", type=Path, help="model, pictures, store; kept for later stages")
    parser.add_argument("--limit-s", type=float, default=280, help="for each process")
    parser.add_argument(
        "--ours", default="", help='more options for onediff-ext: --ours="--backend eager"'
    )
    parser.add_argument("--variant", default="", help="added to our contenders' names then")
    parser.add_argument(
        "--allowed-psnr", type=float, default=ALLOWED_PSNR_DB, help="dB of the worst picture"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replace", action="store_true", help="forget what is in the JSON file")
    parser.add_argument("--make-model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make_model:
        return _make_model(arguments)
    return Run(arguments).all_stages()


class Run:
    """One call of the benchmark."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from benchmarks.fingerprint import fingerprint

        self.options = arguments
        self.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = arguments.dtype or ("fp16" if self.device.startswith("cuda") else "fp32")
        work = arguments.work or Path(tempfile.gettempdir()) / (
            f"onediff-bench-pipeline-{arguments.model}-{self.dtype}"
        )
        self.work = work.resolve()
        self.model, self.inputs, self.store = (
            self.work / name for name in ("model", "inputs", "store")
        )
        self.sizes = _sizes(arguments.sizes, arguments.scale)
        self.base: dict[str, Any] = {
            "what": "image to image from the command line, whole processes",
            "model": arguments.model,
            "dtype": DTYPE_NAMES[self.dtype],
            "fingerprint": fingerprint(torch.device(self.device)),
            "steps": arguments.steps,
            "strength": arguments.strength,
            "unet_steps": int(arguments.steps * arguments.strength),
            "guidance": GUIDANCE,
            "sampler": "Euler a",
            "batch_size": arguments.batch_size,
            "pictures": len(self.sizes) * arguments.pictures,
            "upcast_vae": not arguments.no_upcast,
        }
        self.figures = self.merged = {**self.base, "rows": [], "contenders": {}}
        if arguments.json is not None and not arguments.replace:
            self.old = read_result(arguments.json)
        else:
            self.old = None
        check_mergeable(self.old, self.base, SETTINGS)

    def all_stages(self) -> int:
        """Run the chosen stages in order, and write the figures after each."""
        asked = self.options.stages.split(",")
        stages = [stage for stage in STAGES if stage in asked]
        unknown = set(asked) - {*STAGES, "none"}
        if unknown:
            raise SystemExit(f"No such stage: {', '.join(sorted(unknown))}")
        if "prepare" in stages:
            self.prepare()
        for _ in range(self.options.rounds):
            for stage in stages[stages[:1] == ["prepare"] :]:
                self.fill() if stage == "fill" else self.draw(stage)
                self.summarise()
        if not stages:
            self.summarise()
        return 0 if self.report() else 1

    def prepare(self) -> None:
        """Write the model folder and the pictures."""
        for name in ("model", "inputs", "store", "out"):
            shutil.rmtree(self.work / name, ignore_errors=True)
        self.inputs.mkdir(parents=True)
        make_inputs(self.inputs, self.sizes, self.options.pictures)
        command = [
            sys.executable, "-m", "benchmarks.pipeline", "--make-model", str(self.model),
            "--model", self.options.model, "--device", self.device, "--dtype", self.dtype,
        ]  # fmt: skip
        seconds = self._process("prepare", command + ["--no-upcast"] * self.options.no_upcast)
        # Eager's modules are in the disk cache now; read ours too, for a fair comparison.
        self._process("modules", [sys.executable, "-c", f"import {', '.join(READ_BEFORE)}"])
        print(f"prepare: model and {self.base['pictures']} pictures in {seconds:.1f} s", flush=True)

    def fill(self) -> None:
        """Build missing graphs with a warm-up, as a user would."""
        middle = self.sizes[len(self.sizes) // 2]
        report = self.work / "fill.json"
        command = [
            *self._ours("warmup"), f"{middle[0]}x{middle[1]}", "--json", str(report),
        ]  # fmt: skip
        report.unlink(missing_ok=True)
        seconds = self._process("fill", command, good=(0, 1))  # 1: a kind runs eager
        found = read_result(report) or {}
        self.figures["fill"] = {
            "seconds": seconds,
            **{key: found[key] for key in ("built", "loaded") if key in found},
        }
        print(f"fill: {self.figures['fill']}", flush=True)

    def draw(self, stage: str) -> None:
        """Run one contender's process and record its figures."""
        variant = self.options.variant if stage not in ("eager", "plain") else ""
        name = " ".join([CONTENDERS[stage], *variant.split()])
        if not self.model.exists():
            raise SystemExit(f"There is no model in {self.work}: run the stage prepare first.")
        if stage == "empty":
            shutil.rmtree(self.store, ignore_errors=True)
        output, report = self.work / "out" / name, self.work / f"{name}.json"
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        report.unlink(missing_ok=True)
        command = (
            self._diffusers(output, compiled=stage == "plain")
            if stage in ("eager", "plain")
            else [
                *self._ours("img2img"), str(self.inputs), "--output", str(output),
                "--prompt", PROMPT, "--negative-prompt", NEGATIVE_PROMPT,
                "--steps", str(self.options.steps), "--strength", str(self.options.strength),
                "--guidance", str(GUIDANCE), "--scheduler", "Euler a", "--seed", str(SEED),
                "--batch-size", str(self.options.batch_size), "--report", str(report),
            ]
        )  # fmt: skip
        started = time.time()
        wall_s = self._process(name, command)
        times = picture_times(output, started)
        if len(times) != self.base["pictures"]:
            raise SystemExit(f"{name} drew {len(times)} of {self.base['pictures']} pictures.")
        rows = size_rows(times)
        run = {
            "wall_s": wall_s,
            "first_picture_s": times[0][1],
            "start_up_s": start_up_s(times, rows),
            "pictures_per_minute": 60 * len(times) / wall_s,
        }
        found: dict[str, Any] = read_result(report) or {}
        facts: dict[str, Any] = {
            key: found[key]
            for key in ("graphs", "fallbacks", "warnings", "recompiles", "peak_bytes")
            if key in found
        }
        earlier = self.figures["contenders"].get(name)
        runs = [] if earlier is None else earlier["runs"]
        self.figures["contenders"][name] = {
            "measured": now(), "runs": [*runs, run], **facts,
        }  # fmt: skip
        for row in rows:
            row |= {"contender": name, "dtype": self.base["dtype"]}
        self.figures = merge(self.figures, {**self.figures, "rows": rows}, same=SETTINGS)
        print(
            f"{name}: {wall_s:.1f} s, first picture after {run['first_picture_s']:.1f} s,"
            f" {run['pictures_per_minute']:.1f} pictures a minute",
            flush=True,
        )

    def summarise(self) -> None:
        """Compare pictures, compute ratios and write the file."""
        self.merged = merge(self.old, self.figures, same=SETTINGS)
        fresh = set(self.figures["contenders"])
        compare_with_eager(self.merged, self.work / "out", fresh, self.options.allowed_psnr)
        if self.options.json is not None:
            write_result(self.options.json, self.merged)

    def report(self) -> bool:
        """Print the result; return False when pictures differ."""
        good = True
        for name, found in self.merged["contenders"].items():
            parity = found.get("parity", {})
            good &= parity.get("within_tolerance", True)
            print(
                f"{name:28} {found['pictures_per_minute']:6.1f}/min"
                f"  start-up {found['start_up_s']:5.1f} s"
                f"  ratio {_number(found.get('ratio'))} (without start-up"
                f" {_number(found.get('ratio_without_start_up'))})"
                f"  PSNR at least {_number(parity.get('psnr_db_min'))} dB"
            )
        return good

    def _diffusers(self, output: Path, *, compiled: bool) -> list[str]:
        return [
            sys.executable, "-m", "benchmarks.pipeline_eager", str(self.inputs),
            "--model", str(self.model), "--output", str(output), "--device", self.device,
            "--dtype", DTYPE_NAMES[self.dtype], "--prompt", PROMPT,
            "--negative-prompt", NEGATIVE_PROMPT, "--steps", str(self.options.steps),
            "--strength", str(self.options.strength), "--guidance", str(GUIDANCE),
            "--batch-size", str(self.options.batch_size), "--seed", str(SEED),
            *["--compile"] * compiled,
        ]  # fmt: skip

    def _ours(self, command: str) -> list[str]:
        return [
            sys.executable, "-m", "onediff_ext", command, "--model", str(self.model),
            "--store", str(self.store), "--device", self.device, "--dtype", self.dtype,
            *self.options.ours.split(),
        ]  # fmt: skip

    def _process(self, name: str, command: list[str], good: tuple[int, ...] = (0,)) -> float:
        """Run a process with its output in a log; return its seconds."""
        logs = self.work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # Empty compiler caches; caches of earlier processes would shorten the start.
        caches = self.work / "caches"
        shutil.rmtree(caches, ignore_errors=True)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "HF_HUB_OFFLINE": "1",
            "ONEDIFF_STORE": str(self.store),  # of a script that names none
        }
        log = logs / f"{name}.txt"
        start = time.perf_counter()
        status: int | str
        with log.open("w", encoding="utf-8") as stream:
            try:
                status = subprocess.run(
                    command, stdout=stream, stderr=subprocess.STDOUT, env=environment,
                    timeout=self.options.limit_s, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = "time limit"
        seconds = time.perf_counter() - start
        if status not in good:
            print(log.read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
            raise SystemExit(f"{name} ended with status {status}; its log: {log}")
        return seconds


def compare_with_eager(
    figures: dict[str, Any], output: Path, fresh: set[str], allowed_psnr_db: float
) -> None:
    """Compute all contenders' figures and their ratios to eager.

    Args:
        figures: Merged figures; changed in place.
        output: Has a folder of pictures for each contender.
        fresh: Contenders with pictures in `output`; the others were compared before.
        allowed_psnr_db: Lower limit for the picture that differs most from eager's.
    """
    contenders = figures["contenders"]
    for found in contenders.values():
        for key in ("wall_s", "first_picture_s", "start_up_s", "pictures_per_minute"):
            found[key] = statistics.median(run[key] for run in found["runs"])
    eager = contenders.get("eager")
    for name, found in contenders.items():
        if name == "eager" or eager is None:
            continue
        if name in fresh and (output / "eager").exists():
            found["parity"] = compare_pictures(output / "eager", output / name)
        found["ratio"] = found["ratio_without_start_up"] = None
        if "parity" not in found:
            continue
        parity = found["parity"]
        parity["allowed_psnr_db"] = allowed_psnr_db
        parity["within_tolerance"] = (
            parity["psnr_db_min"] >= allowed_psnr_db
            and parity["contrast_levels_min"] >= NEEDED_CONTRAST_LEVELS
        )
        if parity["within_tolerance"]:
            found["ratio"] = found["pictures_per_minute"] / eager["pictures_per_minute"]
            found["ratio_without_start_up"] = _drawing_s(figures, "eager") / _drawing_s(
                figures, name
            )


def _drawing_s(figures: dict[str, Any], name: str) -> float:
    return sum(float(row["ms_mean"]) for row in figures["rows"] if row["contender"] == name)


def _make_model(arguments: argparse.Namespace) -> int:
    """Run the stage `prepare` in a separate process, so that it leaves no memory allocated."""
    import torch

    from benchmarks.models import DTYPES, make_pipeline

    pipe = make_pipeline(arguments.model, torch.device(arguments.device), DTYPES[arguments.dtype])
    if arguments.no_upcast:
        pipe.vae.register_to_config(force_upcast=False)
    pipe.save_pretrained(arguments.make_model, safe_serialization=True)
    return 0


def _sizes(text: str, scale: int) -> list[tuple[int, int]]:
    from onediff_ext.core.shapes import parse_sizes

    return [
        (max(64, s.width_px // scale // 8 * 8), max(64, s.height_px // scale // 8 * 8))
        for s in parse_sizes(text)
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())

"""One folder on one worker and on several, with an empty and a filled store; start-up counts.

Each row is a command of its own, timed from its start to its end. The JSON file is written after
each row; rows of several calls with equal settings are merged, so they need not fit in one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster_faults import make_pictures
from benchmarks.fingerprint import fingerprint
from benchmarks.results import check_mergeable, merge, now, read_result, write_result
from onediff_ext.core.demo_files import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[1]
ROWS = ("several-empty", "several-filled", "one-filled", "one-empty", "cfg-parallel")
_SAME = ("what", "model", "pictures", "sizes", "height_px", "steps", "strength", "batch_size")
_CFG_STEPS = 50


@dataclass(frozen=True)
class SpeedJob:
    """What is measured.

    Args:
        model: ``"sdxl"`` for random weights of SDXL's architecture, a checkpoint's file or folder,
            or None for the demo's.
        gpus: Workers; on a machine without a GPU these are processes.
        pictures, sizes: Of the folder.
        height_px: Of its pictures. They are 0.75 to 1.25 times as wide. Those of the demo's
            checkpoint are as `make_pictures` makes them.
        steps: Of each picture; the strength is 1.
        batch_size: Most pictures of one size at once.
        rows: Of `ROWS`.
        limit_s: No row goes on after so many seconds.
        work: Folder for model, pictures and stores; None for one that is removed.
    """

    model: str | None
    gpus: int
    pictures: int
    sizes: int
    steps: int
    batch_size: int = 1
    rows: Sequence[str] = ROWS[:4]
    limit_s: float = 560.0
    work: Path | None = None
    height_px: int = 1024


def measure(job: SpeedJob, json_path: Path | None = None) -> dict[str, Any]:
    """Time the command line on one worker and on several.

    Args:
        job: What to measure.
        json_path: Gets the result after each row; older rows of it stay.

    Returns:
        Seconds and pictures a second of each row, and how much faster the workers are.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "what": "image to image on several GPUs, whole processes",
        "model": job.model or "onediff-demo",
        "fingerprint": fingerprint(device),
        "gpus": job.gpus,
        "pictures": job.pictures,
        "sizes": job.sizes,
        "height_px": job.height_px,
        "steps": job.steps,
        "strength": 1,
        "batch_size": job.batch_size,
        "rows": [],
    }
    old = None if json_path is None else read_result(json_path)
    check_mergeable(old, result, _SAME)
    with tempfile.TemporaryDirectory(prefix="onediff-speed-") as own:
        run = _Runs(job, job.work or Path(own), device)
        for name in job.rows:
            try:
                row = {"row": name, "measured": now(), **run.row(name)}
            except (subprocess.TimeoutExpired, RuntimeError) as exc:
                print(f"{name}: no figure: {exc}", file=sys.stderr, flush=True)
                continue
            result["rows"] = [*result["rows"], row]
            print(json.dumps(row), flush=True)
            if json_path is not None:
                write_result(json_path, _judged(merge(old, result, key=("row",), same=_SAME)))
    return _judged(merge(old, result, key=("row",), same=_SAME))


def _judged(result: dict[str, Any]) -> dict[str, Any]:
    """Add how much faster several workers are, and whether the pictures are equal."""
    rows = {row["row"]: row for row in result["rows"]}
    times_faster: dict[str, float] = {}
    for store in ("filled", "empty"):
        one, several = rows.get(f"one-{store}"), rows.get(f"several-{store}")
        if one and several:
            times_faster[store] = round(one["seconds"] / several["seconds"], 3)
            rates = [row["pictures_per_second_after_start"] for row in (several, one)]
            times_faster[f"{store}, after the start"] = round(rates[0] / rates[1], 3)
    judged = {**result, "times_faster": times_faster}
    if {"one-filled", "several-filled"} <= rows.keys():
        same = rows["one-filled"]["digest"] == rows["several-filled"]["digest"]
        judged["equal_to_one_gpu"] = same
    return judged


class _Runs:
    """Runs the commands, over one checkpoint and one folder of pictures."""

    def __init__(self, job: SpeedJob, work: Path, device: torch.device) -> None:
        self._job, self._work, self._device = job, work, device
        self._ends_at = time.monotonic() + job.limit_s
        work.mkdir(parents=True, exist_ok=True)
        self._checkpoint = self._make_checkpoint()
        if not (work / "in").exists():
            _make_inputs(work / "in", job)
        self._told("inputs and model are there")

    def row(self, name: str) -> dict[str, Any]:
        """Measure one row."""
        if name == "cfg-parallel":
            return self._cfg_parallel()
        count, store = name.split("-")
        return self._img2img(self._job.gpus if count == "several" else 1, store, name)

    def _img2img(self, workers: int, store: str, name: str) -> dict[str, Any]:
        job, report = self._job, self._work / f"report-{name}.json"
        folder = self._store(name) if store == "empty" else self._filled_store()
        output = self._work / f"out-{name}"
        shutil.rmtree(output, ignore_errors=True)
        command = ["-m", "onediff_ext", "img2img", str(self._work / "in"), "-o", str(output)]
        command += ["-m", str(self._checkpoint), "--store", str(folder), "--strength", "1"]
        command += ["--steps", str(job.steps), "--batch-size", str(job.batch_size)]
        command += ["--report", str(report)]
        if workers > 1:
            command += ["--gpus", str(workers)]
        began_at, start = time.time(), time.perf_counter()
        self._run(command, {} if workers > 1 else {"CUDA_VISIBLE_DEVICES": "0"})
        seconds = time.perf_counter() - start
        told = json.loads(report.read_text(encoding="utf-8"))
        results = sorted(output.glob("*.png"))
        written_at = sorted(path.stat().st_mtime for path in results)
        self._told(f"{name}: {seconds:.1f} s")
        return {
            "workers": workers,
            "store": store,
            "seconds": round(seconds, 2),
            "pictures": len(results),
            "pictures_per_second": round(len(results) / seconds, 3),
            "first_picture_s": round(written_at[0] - began_at, 2),
            "last_picture_s": round(written_at[-1] - began_at, 2),
            "pictures_per_second_after_start": round(
                (len(results) - 1) / (written_at[-1] - written_at[0]), 4
            ),
            "digest": _digest(results),
            "ready_seconds": told["ready_seconds"],
            "start_up": told["start_up"],
            "graphs": told["graphs"],
            "fallbacks": told["fallbacks"][:5],
            "of_each_worker": [
                {
                    key: row[key]
                    for key in (
                        "name",
                        "gpu",
                        "pictures",
                        "draws_with",
                        "ready_seconds",
                        "start_up",
                    )
                }
                for row in told.get("workers", [])
            ],
        }

    def _cfg_parallel(self) -> dict[str, Any]:
        path = self._work / "cfg-parallel.json"
        path.unlink(missing_ok=True)
        command = ["-m", "benchmarks.cfg_parallel", "--json", str(path)]
        command += ["--store", str(self._filled_store()), "--steps", str(_CFG_STEPS)]
        command += ["--model", self._job.model or "tiny"]
        self._run(command, {})
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {key: value for key, value in found.items() if key != "fingerprint"}

    def _store(self, name: str) -> Path:
        folder = self._work / f"store-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _filled_store(self) -> Path:
        """A store that a row has filled; else one that `warmup` fills."""
        found = sorted(self._work.glob("store-*/**/*.graph"))
        if found:
            return self._work / found[0].relative_to(self._work).parts[0]
        folder = self._work / "store-warmup"
        size = "256x256" if self._job.model is None else "1024x1024"
        command = ["-m", "onediff_ext", "warmup", size, "-m", str(self._checkpoint)]
        self._run([*command, "--store", str(folder)], {})
        self._told("the store is filled")
        return folder

    def _make_checkpoint(self) -> Path:
        """A checkpoint on disk: speed depends on the architecture, not on the weights."""
        model = self._job.model
        if model is None:
            return DEMO_MODEL
        if Path(model).exists():
            return Path(model)
        path = self._work / f"{model}.safetensors"
        if not path.exists():
            # Another process, so that no memory of a GPU stays in use.
            script = "from benchmarks import cluster_speed as c; import sys; c.save(*sys.argv[1:])"
            self._run(["-c", script, model, str(path), str(self._device)], {})
        return path

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        left_s = self._ends_at - time.monotonic()
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=max(1.0, left_s),
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-3000:]}")

    def _told(self, text: str) -> None:
        left_s = self._ends_at - time.monotonic()
        print(f"{text} ({left_s:.0f} s left)", file=sys.stderr, flush=True)


def save(model: str, path: str, device: str) -> None:
    """Save a checkpoint with random weights.

    Args:
        model: As for `make_pipeline`.
        path: A .safetensors file.
        device: Where the weights are made; a GPU is faster.
    """
    from benchmarks.models import make_pipeline
    from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm

    save_ldm(make_pipeline(model, torch.device(device), torch.float16), path)


def _make_inputs(folder: Path, job: SpeedJob) -> None:
    if job.model is None:
        make_pictures(folder, job.pictures, job.sizes)
        return
    from PIL import Image

    folder.mkdir()
    least, most = 3 * job.height_px // 4, 5 * job.height_px // 4
    for number in range(job.pictures):
        wider = (most - least) * (number % job.sizes) // max(1, job.sizes - 1)
        width_px = (least + wider) // 8 * 8
        picture = Image.effect_noise((width_px, job.height_px), 60).convert("RGB")
        picture.save(folder / f"{number:05d}.png", compress_level=1)


def _digest(paths: Sequence[Path]) -> str:
    """Return one digest of all pictures' pixels."""
    from PIL import Image

    found = hashlib.sha256()
    for path in paths:
        with Image.open(path) as picture:
            found.update(path.name.encode() + picture.convert("RGB").tobytes())
    return found.hexdigest()

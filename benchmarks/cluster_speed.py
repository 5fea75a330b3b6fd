"""One folder on one worker and on several, with an empty and a filled store; start-up counts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster_faults import make_pictures
from benchmarks.fingerprint import fingerprint
from onediff_ext.core.demo_files import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[1]
_SIDES = (768, 1280)  # of SDXL's pictures; the demo model's are as `make_pictures` makes them


def measure(model: str | None, gpus: int, pictures: int, sizes: int, steps: int) -> dict[str, Any]:
    """Time the command line on one worker and on `gpus` workers.

    Args:
        model: ``"sdxl"`` for random weights of SDXL's architecture, a checkpoint's file or folder,
            or None for the demo's.
        gpus: Workers; on a machine without a GPU these are processes.
        pictures, sizes: Of the folder.
        steps: Of each picture; the strength is 1.

    Returns:
        Seconds and pictures a second of each row, and how much faster the workers are.
    """
    with tempfile.TemporaryDirectory(prefix="onediff-speed-") as name:
        folder = Path(name)
        checkpoint = _checkpoint(model, folder)
        _inputs(folder / "in", pictures, sizes, is_large=model is not None)
        rows = []
        for workers in (1, gpus):
            store = folder / f"store-{workers}"
            for state in ("empty", "filled"):
                output = folder / f"out-{workers}-{state}"
                rows.append(_run(folder, checkpoint, store, output, workers, state, steps))
    seconds = {(row["workers"], row["store"]): row["seconds"] for row in rows}
    return {
        "what": "cluster",
        "model": model or "onediff-demo",
        "pictures": pictures,
        "sizes": sizes,
        "steps": steps,
        "machine": fingerprint(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "rows": rows,
        "times_faster": {
            state: round(seconds[1, state] / seconds[gpus, state], 3)
            for state in ("empty", "filled")
        },
    }


def _run(
    folder: Path,
    checkpoint: Path,
    store: Path,
    output: Path,
    workers: int,
    state: str,
    steps: int,
) -> dict[str, Any]:
    report = folder / f"report-{workers}-{state}.json"
    command = [sys.executable, "-m", "onediff_ext", "img2img", str(folder / "in")]
    command += ["-o", str(output), "-m", str(checkpoint), "--store", str(store)]
    command += ["--steps", str(steps), "--strength", "1", "--report", str(report)]
    if workers > 1:
        command += ["--gpus", str(workers)]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(done.stderr)
    told = json.loads(report.read_text(encoding="utf-8"))
    return {
        "workers": workers,
        "store": state,
        "seconds": round(seconds, 2),
        "pictures_per_second": round(len(told["pictures"]) / seconds, 3),
        "ready_seconds": told["ready_seconds"],
        "graphs": told["graphs"],
        "of_each_worker": [
            {key: row[key] for key in ("name", "gpu", "pictures", "draws_with", "ready_seconds")}
            for row in told.get("workers", [])
        ],
    }


def _inputs(folder: Path, pictures: int, sizes: int, *, is_large: bool) -> None:
    if not is_large:
        make_pictures(folder, pictures, sizes)
        return
    from PIL import Image

    folder.mkdir()
    least, most = _SIDES
    for number in range(pictures):
        width_px = least + (most - least) * (number % sizes) // max(1, sizes - 1) // 8 * 8
        picture = Image.effect_noise((width_px, 1024), 60).convert("RGB")
        picture.save(folder / f"{number:05d}.png", compress_level=1)


def _checkpoint(model: str | None, folder: Path) -> Path:
    """A checkpoint on disk: speed depends on the architecture, not on the weights."""
    if model is None:
        return DEMO_MODEL
    if Path(model).exists():
        return Path(model)
    from benchmarks.models import make_pipeline
    from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm

    pipeline = make_pipeline(model, torch.device("cpu"), torch.float16)
    return save_ldm(pipeline, folder / f"{model}.safetensors")

"""Pictures of a running WebUI with and without OneDiff: ``python -m benchmarks.webui --url URL``.

The WebUI runs on this machine with ``--api`` and the checkpoint to measure. The host alone draws
each size first; then OneDiff draws it after a warm-up, from the same seed. Milliseconds per step
are the difference of two jobs, one with twice the steps, so VAE and PNG do not count. Seconds are
of a whole request. With ``--switch-to`` the checkpoint is changed and changed back.

``--breakdown FILE`` also says where a picture's seconds go. The WebUI has to be started by
``python -m benchmarks.webui_phases FILE launch.py …`` for that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pictures import photograph, psnr_db
from benchmarks.results import write_result
from onediff_ext.core.options import PRECISIONS
from tests.support.webui_client import WebUI

SIZES = "1024x1024, 960x720, 720x720, 512x512"
JOB = {
    "prompt": "a red apple on a wooden table, photograph",
    "negative_prompt": "blurry",
    "sampler_name": "Euler",
    "cfg_scale": 7,
    "seed": 7,
}
_POLL_S = 0.25
# A warm-up, or builds, count as finished after this time without activity.
_QUIET_S = 2.0


def is_active(status: Mapping[str, Any]) -> bool:
    """Whether the extension builds, warms up, or will, by its status."""
    return bool(status["building"] or status["stage"] or status["sizes_needed"])


def wait_until_quiet(webui: Any, limit_s: float) -> tuple[float, dict[str, Any]]:
    """Wait until the extension builds nothing any more.

    Args:
        webui: A `WebUI`.
        limit_s: How long to wait.

    Returns:
        The seconds until it became quiet, and its last status, which `is_active` after the limit.
    """
    start = quiet_since = time.monotonic()
    while True:
        time.sleep(_POLL_S)
        status, now = webui.status(), time.monotonic()
        if is_active(status):
            quiet_since = now
        if now - quiet_since > _QUIET_S or now - start > limit_s:
            return quiet_since - start, status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:7860")
    parser.add_argument("--model", default="sdxl", help="its name in the JSON file")
    parser.add_argument(
        "--checkpoint", help="title of the one to measure (default: the loaded one)"
    )
    parser.add_argument("--switch-to", help="title of another one of the same architecture")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=3, help="of each size, after the first")
    parser.add_argument("--precision", default="exact", help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--backend", default="", help="of OneDiff's graphs")
    parser.add_argument("--warm-up-limit-s", type=float, default=600)
    parser.add_argument("--breakdown", type=Path, help="the file of benchmarks.webui_phases")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.breakdown is not None and not arguments.breakdown.parent.is_dir():
        parser.error(f"--breakdown: {arguments.breakdown.parent} is no folder")
    run = Run(arguments)
    try:
        run.measure()
    finally:
        run.write()
    return 0


class Run:
    """One call of the benchmark."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from benchmarks.fingerprint import fingerprint
        from onediff_ext.core.shapes import parse_sizes

        self._given = arguments
        self._webui = WebUI(arguments.url, Path())
        self._sizes = [(size.width_px, size.height_px) for size in parse_sizes(arguments.sizes)]
        self._eager: dict[tuple[str, tuple[int, int], str], np.ndarray] = {}
        self._checkpoint = ""
        backend = {"backend": arguments.backend} if arguments.backend else {}
        self._on: dict[str, Any] = {"enabled": True, **backend}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._figures: dict[str, Any] = {
            "what": "pictures of a WebUI over its API",
            "model": arguments.model,
            "host": self._webui.host(),
            "steps": arguments.steps,
            "sampler": JOB["sampler_name"],
            "fingerprint": fingerprint(device),
            "rows": [],
            "contenders": {},
        }

    def measure(self) -> None:
        """Draw with the host alone, each precision, another checkpoint, and the first one again."""
        given = self._given
        if given.checkpoint:
            self._load(given.checkpoint)
        if given.switch_to:
            own = given.checkpoint or self._webui.option("sd_model_checkpoint")
            self._load(given.switch_to)
            self._draw_sizes("eager", {"enabled": False}, self._sizes[:1])
            self._load(own)
        self._draw_sizes("eager", {"enabled": False}, self._sizes)
        for precision in (part.strip() for part in given.precision.split(",")):
            name, chosen = f"ours-{precision}", {**self._on, "precision": precision}
            self._warm_up(name, chosen)
            self._draw_sizes(name, chosen, self._sizes)
        if given.switch_to:
            for title in (given.switch_to, own):
                self._load(title)
                self._draw_sizes("ours-exact", self._on, self._sizes[:1])

    def write(self) -> None:
        """Write all figures so far; also after an error."""
        if self._given.json is not None:
            write_result(self._given.json, self._figures)

    def _load(self, title: str) -> None:
        self._webui.set_options(sd_model_checkpoint=title)
        self._checkpoint = title

    def _warm_up(self, name: str, chosen: dict[str, Any]) -> None:
        sizes = ", ".join(f"{width}x{height}" for width, height in self._sizes)
        self._webui.post("/onediff/v1/warmup", {**chosen, "sizes": sizes})
        busy_s, status = wait_until_quiet(self._webui, self._given.warm_up_limit_s)
        if is_active(status):
            # The next warm-up would be refused, and builds would slow the pictures down.
            self._webui.post("/onediff/v1/cancel")
        self._figures["contenders"][name] = {
            "warm_up_s": busy_s,
            "kinds": status["kinds_needed"],
            "failed": status["kinds_failed"],
            "line": status["line"],
            "reasons": status["reasons"],
        }
        print(f"{name}: warm-up in {busy_s:.1f} s, {status['line']}", flush=True)

    def _draw_sizes(self, name: str, chosen: dict[str, Any], sizes: list[tuple[int, int]]) -> None:
        for size in sizes:
            for task in ("txt2img", "img2img"):
                row = self._draw(name, chosen, size, task)
                self._figures["rows"].append(row)
                shown = f"{size[0]}x{size[1]}"
                print(
                    f"{shown:>9} {task} {name:12} {row['seconds']:6.2f} s"
                    f"  {row['ms_step']:7.1f} ms a step  first {row['first_s']:6.2f} s"
                    f"  PSNR {row.get('psnr_db', '-')}  {row['line']}",
                    flush=True,
                )

    def _draw(
        self, name: str, chosen: dict[str, Any], size: tuple[int, int], task: str
    ) -> dict[str, Any]:
        job: dict[str, Any] = {**JOB, "width": size[0], "height": size[1]}
        strength = 1.0
        if task == "img2img":
            strength = job["denoising_strength"] = 0.5
            job["init_images"] = [np.asarray(photograph(0, size))]
        steps = self._given.steps

        def draw(steps: int) -> Any:
            return self._webui.draw(chosen, task, steps=steps, **job)

        first = draw(steps)
        before = len(self._phases())
        drawn = [draw(steps) for _ in range(self._given.pictures)]
        seconds = statistics.median(one.seconds for one in drawn)
        phases = self._phases()[before:]
        longer = statistics.median(draw(2 * steps).seconds for _ in range(2))
        status = self._webui.status()
        row: dict[str, Any] = {
            "contender": name,
            "checkpoint": self._checkpoint,
            "width": size[0],
            "height": size[1],
            "task": task,
            "first_s": first.seconds,
            "seconds": seconds,
            "ms_step": 1e3 * (longer - seconds) / (steps * strength),
            "line": status["line"] if name != "eager" else "eager",
        }
        if phases:
            row["phases"] = breakdown(phases, [one.seconds for one in drawn])
            print(f"          {row['phases']}", flush=True)
        picture = drawn[-1].pictures[0].astype(np.float64)
        key = (self._checkpoint, size, task)
        if name == "eager":
            self._eager[key] = picture
        elif key in self._eager:
            row["captures"] = status["captures"]
            row["psnr_db"] = round(psnr_db(picture, self._eager[key]), 2)
        return row

    def _phases(self) -> list[dict[str, float]]:
        """The seconds by phase of each picture so far."""
        path = self._given.breakdown
        if path is None or not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def breakdown(phases: list[dict[str, float]], seconds: list[float]) -> dict[str, float]:
    """Return the median seconds of each phase.

    Args:
        phases: Of each picture, as `benchmarks.webui_phases` writes them.
        seconds: Of each picture's request. What is not in a phase is "the API's answer".

    Raises:
        ValueError: There is not one line of phases for each picture.
    """
    if len(phases) != len(seconds):
        raise ValueError(
            f"{len(phases)} lines for {len(seconds)} pictures: is the file another WebUI's?"
        )
    outside = [s - sum(one.values()) for s, one in zip(seconds, phases, strict=True)]
    names = {name for one in phases for name in one}
    found = {name: statistics.median(one.get(name, 0.0) for one in phases) for name in names}
    found["the API's answer"] = statistics.median(outside)
    return {name: round(found[name], 4) for name in sorted(found, key=found.__getitem__)[::-1]}


if __name__ == "__main__":
    raise SystemExit(main())

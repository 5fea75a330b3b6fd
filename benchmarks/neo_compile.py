"""Neo's own Torch Compile beside OneDiff: ``python -m benchmarks.neo_compile CHECKOUT``.

Each contender draws in a Forge Neo of its own, over its API: the host alone, OneDiff, and the
presets of "Torch Compile Integrated". Its caches are empty at first. Then come: the first picture
after the start, a LoRA that is switched on and off ``--lora-changes`` times, new sizes, and the
first pictures after a restart with the caches as they are then. Seconds are of a whole request, so
the first picture includes the loading of the checkpoint. It is asked for as soon as the WebUI
answers, or ``--pause-s`` later, as by somebody who opens the page. Milliseconds per step are the
difference of two jobs, one with twice the steps.

Figures are written after each row, and rows of an earlier run stay. A picture that is not there
after ``--limit-s`` ends its contender; so does the end of ``--total-s``. If it is one of a new
size, the restart is measured nevertheless.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pictures import psnr_db
from benchmarks.results import check_mergeable, merge, read_result, write_result
from benchmarks.webui import JOB, is_active, wait_until_quiet
from benchmarks.webui_process import WebUIProcess
from tests.support.webui_client import Drawn, WebUIError

CONTENDERS = ("host", "ours", "max-autotune", "max-autotune-no-cudagraphs")
# A preset that only Neo's script has; the script's own name is translated in some copies.
_PRESET = "max-autotune-no-cudagraphs"
_FLAGS = ("--skip-prepare-environment",)
_KEY = ("contender", "event", "width", "height")
_SAME = ("what", "model", "steps", "pause_s")
# What the host's log tells of its compiler.
_LOG_LINES = {
    "compiled": "Model Compiled",
    "failed": "WON'T CONVERT",
    "recompiled": "Recompiling function",
    "without_cuda_graphs": "skipping cudagraphs",
}

Size = tuple[int, int]


class OverTimeError(Exception):
    """A picture is not there in time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="Forge Neo with this extension")
    parser.add_argument("--model", default="sdxl", help="its name in the JSON file")
    parser.add_argument("--checkpoint", help="file name in models/Stable-diffusion")
    parser.add_argument("--lora", help="name of a LoRA in models/Lora")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--sizes", default="1024x1024, 960x720, 512x512")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg-scale", type=float, default=JOB["cfg_scale"], help="1 for Flux.1")
    parser.add_argument("--pictures", type=int, default=2, help="of each size, after the first")
    parser.add_argument("--lora-changes", type=int, default=1, help="how often it comes on")
    parser.add_argument(
        "--pause-s", type=float, default=0, help="from a start to its first picture"
    )
    parser.add_argument("--backend", default="", help="of OneDiff's graphs")
    parser.add_argument("--flags", default="", help="more of the WebUI's command line")
    parser.add_argument("--port", type=int, default=7863)
    parser.add_argument("--work", type=Path, required=True, help="caches, logs and pictures")
    parser.add_argument("--limit-s", type=float, default=300, help="of one picture")
    parser.add_argument("--total-s", type=float, default=1800, help="of the whole run")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    # The WebUI has a session of its own, so it would outlive a benchmark that is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return 0 if measure(arguments, _process_of) else 1


def measure(arguments: argparse.Namespace, make: Callable[[argparse.Namespace, str], Any]) -> bool:
    """Measure all contenders.

    Args:
        arguments: Of the command line.
        make: Returns a contender's `WebUIProcess`.

    Returns:
        Whether all rows are there.
    """
    import torch

    from benchmarks.fingerprint import fingerprint
    from onediff_ext.core.shapes import parse_sizes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, Any] = {
        "what": "Neo's Torch Compile",
        "model": arguments.model,
        "steps": arguments.steps,
        "sampler": JOB["sampler_name"],
        "cfg_scale": arguments.cfg_scale,
        "pause_s": arguments.pause_s,
        "flags": [*_FLAGS, *arguments.flags.split()],
        "fingerprint": fingerprint(device),
        "rows": [],
        "contenders": {},
    }
    old = read_result(arguments.json)
    check_mergeable(old, figures, _SAME)

    def write() -> None:
        write_result(arguments.json, merge(old, figures, key=_KEY, same=_SAME))

    sizes = [(size.width_px, size.height_px) for size in parse_sizes(arguments.sizes)]
    ends = time.monotonic() + arguments.total_s
    complete = True
    prepare(arguments, make, sizes[-1])
    for name in (part.strip() for part in arguments.contenders.split(",")):
        process = make(arguments, name)
        contender = Contender(name, process, arguments, figures, write, ends)
        try:
            contender.measure(sizes)
        except (OverTimeError, WebUIError) as exc:
            complete = False
            contender.facts["ended"] = str(exc)
            print(f"{name}: {exc}", flush=True)
        finally:
            process.stop()
            contender.facts["log"] = log_facts(process.log)
            write()
    return complete


def prepare(
    arguments: argparse.Namespace, make: Callable[[argparse.Namespace, str], Any], size: Size
) -> None:
    """Let the host read the checkpoint once: its hash and its modules are on the disk then.

    Otherwise only the first contender would wait for these. Done once for a folder of work.
    """
    done = arguments.work / f"prepared-{arguments.model}"
    if done.exists():
        return
    process = make(arguments, "host")
    try:
        process.start(arguments.limit_s)
        if arguments.checkpoint:
            process.webui.set_options(sd_model_checkpoint=arguments.checkpoint)
        process.webui.draw(False, width=size[0], height=size[1], steps=1)
    finally:
        process.stop()
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()


def _process_of(arguments: argparse.Namespace, name: str) -> WebUIProcess:
    # What these tell is in the log only; it is asked for where Torch Compile is measured.
    tell = {} if name in ("host", "ours") else {"TORCH_LOGS": "recompiles,perf_hints"}
    work = arguments.work.absolute()
    flags = (*_FLAGS, *arguments.flags.split())
    caches = work / "caches" / f"{arguments.model}-{name}"
    log = work / f"{arguments.model}-{name}.log"
    return WebUIProcess(arguments.checkout, flags, arguments.port, caches, log, tell)


def log_facts(log: Path) -> dict[str, int]:
    """Count the lines of a host's log that tell what became of Torch Compile."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return {name: text.count(told) for name, told in _LOG_LINES.items()}


def preset_script(scripts: Sequence[Mapping[str, Any]], preset: str) -> dict[str, Any]:
    """The always-on script's arguments that choose a preset of Neo's Torch Compile.

    Args:
        scripts: As ``/sdapi/v1/script-info`` has them.
        preset: One of its choices.

    Raises:
        WebUIError: The host has no such script or preset. It hides the script without Triton.
    """
    for script in scripts:
        for argument in script["args"]:
            choices = argument.get("choices") or ()
            if _PRESET in choices and not script["is_img2img"]:
                if preset not in choices:
                    raise WebUIError(f"{script['name']} has no preset {preset!r}")
                return {script["name"]: {"args": [preset]}}
    raise WebUIError("the host has no Torch Compile")


class Contender:
    """One contender's rows.

    Args:
        name: "host", "ours", or a preset of Torch Compile.
        process: Its WebUI; starts here, and may still run afterwards.
        arguments: Of the command line.
        figures: Of the file; rows are added.
        write: Called after each row.
        ends: When the whole run ends, by the monotonic clock.
    """

    def __init__(
        self,
        name: str,
        process: Any,
        arguments: argparse.Namespace,
        figures: dict[str, Any],
        write: Callable[[], None],
        ends: float,
    ) -> None:
        self._name, self._process, self._given = name, process, arguments
        self._webui = process.webui
        self._figures, self._write, self._ends = figures, write, ends
        self._scripts: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}

    def measure(self, sizes: Sequence[Size]) -> None:
        """Draw what the module's docstring tells.

        Raises:
            OverTimeError: A picture is not there in time.
            WebUIError: The host has ended or answers with an error.
        """
        self._figures["contenders"][self._name] = self.facts
        self._start("start_s")
        self._row("start", sizes[0])
        if self._given.lora:
            self._lora_rows(sizes[0])
        drawn, late = [], None
        try:
            for size in sizes[1:]:
                self._row("new size", size)
                drawn.append(size)
        except OverTimeError as exc:
            late = exc
        self._process.stop()
        self._start("restart_s")
        self._row("restart", sizes[0], with_steps=False)
        for size in drawn:
            self._row("new size after the restart", size, with_steps=False)
        if late is not None:
            raise late

    def _start(self, fact: str) -> None:
        self.facts[fact] = self._process.start(self._seconds_left())
        if self._given.checkpoint:
            self._webui.set_options(sd_model_checkpoint=self._given.checkpoint)
        if self._name not in ("host", "ours"):
            scripts = self._webui.get("/sdapi/v1/script-info")
            self._scripts = preset_script(scripts, self._name)
        time.sleep(self._given.pause_s)

    def _lora_rows(self, size: Size) -> None:
        """Switch the LoRA on and off; the first pictures of later times join those of the first."""
        rows = {
            True: self._row("LoRA on", size, lora=True, with_steps=False),
            False: self._row("LoRA off", size, with_steps=False),
        }
        for row in rows.values():
            row["changes_s"] = [row["first_s"]]
        for _ in range(1, self._given.lora_changes):
            for lora, row in rows.items():
                row["changes_s"].append(self._draw(size, lora, self._given.steps).seconds)
        self._write()
        told = [", ".join(f"{s:.2f}" for s in row["changes_s"]) for row in rows.values()]
        print(f"{self._name} LoRA on: {told[0]} s, off: {told[1]} s", flush=True)

    def _row(
        self, event: str, size: Size, lora: bool = False, with_steps: bool = True
    ) -> dict[str, Any]:
        """Draw the first picture, wait for builds, and draw more."""
        steps = self._given.steps
        row: dict[str, Any] = {
            "contender": self._name,
            "event": event,
            "width": size[0],
            "height": size[1],
        }
        try:
            first = self._draw(size, lora, steps)
        except OverTimeError as exc:
            self._add({**row, "stopped": str(exc)})
            raise
        row |= {"drawn": list(first.pictures[0].shape[1::-1]), "first_s": first.seconds}
        self._add(row)
        if self._name == "ours":
            row |= self._wait_for_builds()
        count = self._given.pictures
        # Graphs that were built meanwhile, and the CUDA graphs, are new to this picture.
        row["second_s"] = self._draw(size, lora, steps).seconds
        drawn = [self._draw(size, lora, steps) for _ in range(count)]
        row["seconds"] = statistics.median(one.seconds for one in drawn)
        if with_steps:
            # Torch Compile compiles again for another number of steps.
            row["other_steps_first_s"] = self._draw(size, lora, 2 * steps).seconds
            longer = [self._draw(size, lora, 2 * steps).seconds for _ in range(count)]
            row["ms_step"] = 1e3 * (statistics.median(longer) - row["seconds"]) / steps
        self._compare(row, first, drawn[-1], lora)
        if self._name == "ours":
            status = self._webui.status()
            row |= {key: status[key] for key in ("line", "reasons", "captures")}
        self._write()
        told = "  ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key not in _KEY
        )
        print(f"{self._name} {size[0]}x{size[1]} {event}: {told}", flush=True)
        return row

    def _add(self, row: dict[str, Any]) -> None:
        self._figures["rows"].append(row)
        self._write()

    def _wait_for_builds(self) -> dict[str, Any]:
        """Wait until nothing is built; pictures that come earlier would be drawn meanwhile.

        Returns:
            "builds_s", from the first picture's end, and "unfinished" if that took too long.
        """
        busy_s, status = wait_until_quiet(self._webui, self._seconds_left())
        unfinished = {"unfinished": status["line"]} if is_active(status) else {}
        return {"builds_s": busy_s, **unfinished}

    def _seconds_left(self) -> float:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise OverTimeError("the time of the whole run is over")
        return min(left, float(self._given.limit_s))

    def _draw(self, size: Size, lora: bool, steps: int) -> Drawn:
        job: dict[str, Any] = {**JOB, "cfg_scale": self._given.cfg_scale, "steps": steps}
        job |= {"width": size[0], "height": size[1]}
        if lora:
            job["prompt"] = f"{job['prompt']} <lora:{self._given.lora}:0.5>"
        chosen: dict[str, Any] = {"enabled": self._name == "ours"}
        if self._given.backend:
            chosen["backend"] = self._given.backend
        limit_s = self._seconds_left()
        # A request cannot be taken back: it ends with the process, which its contender stops.
        pool = ThreadPoolExecutor(1)
        asked = pool.submit(self._webui.draw, chosen, "txt2img", self._scripts, **job)
        pool.shutdown(wait=False)
        try:
            drawn: Drawn = asked.result(limit_s)
        except NotInTime:
            raise OverTimeError(f"no picture within {limit_s:.0f} s") from None
        except OSError as exc:
            raise WebUIError(f"the WebUI does not answer: {exc}") from exc
        return drawn

    def _compare(self, row: dict[str, Any], first: Drawn, usual: Drawn, lora: bool) -> None:
        """Compare with the host's own picture, which is kept over runs."""
        name = f"{self._given.model}-{row['width']}x{row['height']}{'-lora' if lora else ''}.npy"
        path = self._given.work / "pictures" / name
        if self._name == "host" and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, usual.pictures[0])
        row["contrast"] = round(float(usual.pictures[0].std()), 1)
        if path.exists():
            own = np.load(path).astype(np.float64)
            for key, one in (("first_psnr_db", first), ("psnr_db", usual)):
                row[key] = round(psnr_db(one.pictures[0].astype(np.float64), own), 2)


if __name__ == "__main__":
    raise SystemExit(main())

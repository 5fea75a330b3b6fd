"""Pictures of a WebUI under a memory limit, for `benchmarks.small_gpu`.

Each contender draws in a WebUI of its own: the host alone, and OneDiff. First each size is drawn
once without and once with the LoRA (``first_s`` and ``first_lora_s``; the very first picture loads
the checkpoint). Then come timed pictures of the first size, after one that is not timed, and then
the soak: all sizes over and over, the LoRA switched on for every second round. A picture that fails
is counted, and the run goes on. OneDiff's pictures are compared with the host's own. If the live
tests' probe is among the checkout's extensions, rows of Forge and Neo have ``conditions``: how many
calls of the model had the prompt and the negative prompt together ("2"), and how many one of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from benchmarks.pictures import psnr_db
from benchmarks.results import check_mergeable, merge, now, read_result, write_result
from benchmarks.webui import JOB, is_active, wait_until_quiet
from benchmarks.webui_process import WebUIProcess
from onediff_ext.core.shapes import parse_sizes
from tests.support.webui_client import Drawn, WebUIError

CONTENDERS = ("host", "ours")
KEY = ("contender", "width", "height")
SAME = ("what", "model", "steps", "gigabytes", "host", "flags", "job")
# A build that lasts longer than this is waited for no more.
_BUILD_LIMIT_S = 240
_CONDITIONS = "/onediff-probe/conditions"

Size = tuple[int, int]
Make = Callable[[argparse.Namespace, str], Any]


def measure(given: argparse.Namespace, make: Make | None = None) -> bool:
    """Measure the contenders.

    Args:
        given: Of `benchmarks.small_gpu`'s command line.
        make: Returns a contender's `WebUIProcess`.

    Returns:
        Whether no picture has failed.
    """
    import torch

    from benchmarks.fingerprint import fingerprint

    sizes = [(size.width_px, size.height_px) for size in parse_sizes(given.sizes)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = {"batch_size": given.batch}
    if given.upscale > 1:
        job |= {"enable_hr": True, "hr_scale": given.upscale, "denoising_strength": 0.5}
    failed = 0
    for name in given.contenders.split(","):
        figures: dict[str, Any] = {
            "what": "a WebUI's pictures under a memory limit",
            "model": given.model, "steps": given.steps, "gigabytes": given.gigabytes,
            "host": given.host, "flags": given.flags.split(), "job": job,
            "fingerprint": fingerprint(device), "rows": [], "contenders": {},
        }  # fmt: skip
        old = None if given.replace else read_result(given.json)
        given.replace = False
        check_mergeable(old, figures, SAME)
        process = (make or process_of)(given, name)
        contender = Contender(name, process, given, sizes, job)
        try:
            contender.measure()
        except WebUIError as exc:
            contender.facts["ended"] = str(exc)
            print(f"{name}: {exc}", flush=True)
        finally:
            process.stop()
        failed += contender.facts["failed"] + ("ended" in contender.facts)
        figures["rows"] = contender.rows()
        figures["contenders"][name] = contender.facts
        write_result(given.json, merge(old, figures, key=KEY, same=SAME))
    return not failed


def process_of(given: argparse.Namespace, name: str) -> WebUIProcess:
    """Return a contender's WebUI, whose GPU is limited."""
    work = given.work.absolute()
    log = work / f"{given.host}-{given.model}-{given.gigabytes:g}gb-{name}.log"
    return WebUIProcess(
        given.checkout,
        given.flags.split(),
        given.port,
        work / "caches" / f"{given.host}-{given.model}-{name}",
        log,
        {} if given.python_path is None else {"PYTHONPATH": given.python_path},
        runner=("-m", "benchmarks.limited_memory", str(given.gigabytes)),
    )


def _lora_dtypes(given: argparse.Namespace) -> list[str]:
    """The dtypes of a LoRA's tensors, as safetensors names them; none without such a file."""
    path: Path = given.checkout / "models" / "Lora" / f"{given.lora}.safetensors"
    if not path.exists():
        return []
    with safe_open(path, "pt") as file:
        return sorted({file.get_slice(name).get_dtype() for name in file.keys()})  # noqa: SIM118


class Contender:
    """One contender's pictures.

    Args:
        name: "host" or "ours".
        process: Its WebUI; starts here.
        given: Of the command line.
        sizes: Of the soak, px; the first one is timed.
        job: Fields of the API for all pictures.

    Attributes:
        facts: What the file says of the contender.
    """

    def __init__(
        self,
        name: str,
        process: Any,
        given: argparse.Namespace,
        sizes: list[Size],
        job: dict[str, Any],
    ) -> None:
        self._name, self._process, self._webui = name, process, process.webui
        self._given, self._sizes, self._job = given, sizes, job
        self._timed: list[float] = []
        self._seconds: dict[tuple[Size, bool], list[float]] = {}
        self._first: dict[tuple[Size, bool], list[float]] = {}
        self._psnr_db: dict[Size, list[float]] = {}
        self._conditions: dict[Size, Counter[str]] = {}
        self._probed = False
        self.facts: dict[str, Any] = {
            "measured": now(), "pictures": 0, "failed": 0, "errors": [], "compared": 0,
        }  # fmt: skip
        if given.lora:
            self.facts["lora"] = {"name": given.lora, "dtypes": _lora_dtypes(given)}

    def measure(self) -> None:
        """Draw what the module's docstring tells.

        Raises:
            WebUIError: The host does not start, or has ended.
        """
        given = self._given
        ends_at = time.monotonic() + given.limit_s
        self.facts["start_s"] = round(self._process.start(given.limit_s), 1)
        if given.checkpoint:
            self._webui.set_options(sd_model_checkpoint=given.checkpoint)
        self._probed = self._webui.has(_CONDITIONS)
        with_lora = (False, True) if given.lora else (False,)
        for lora in with_lora:
            for size in self._sizes:
                self._first[size, lora] = self._picture(size, lora)
                if self._name == "ours" and size == self._sizes[0] and not lora:
                    self._wait_for_builds()
        self._picture(self._sizes[0], False)
        for _ in range(given.pictures):
            self._timed += self._picture(self._sizes[0], False)
        began, drawn = time.monotonic(), 0
        while drawn < given.soak and time.monotonic() < ends_at:
            lap, number = divmod(drawn, len(self._sizes))
            self._picture(self._sizes[number], with_lora[lap % len(with_lora)], keep=True)
            drawn += 1
        self.facts["soak"] = {"pictures": drawn, "seconds": round(time.monotonic() - began, 1)}
        self._note_state()

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each size."""
        found = []
        for size in self._sizes:
            row: dict[str, Any] = {"contender": self._name, "width": size[0], "height": size[1]}
            if size == self._sizes[0] and self._timed:
                row["picture_s"] = round(statistics.median(self._timed), 3)
                row["seconds"] = [round(seconds, 3) for seconds in self._timed]
            for lora, end in ((False, "_s"), (True, "_lora_s")):
                if seconds := self._first.get((size, lora)):
                    row[f"first{end}"] = round(seconds[0], 3)
                if seconds := self._seconds.get((size, lora)):
                    row[f"soak{end}"] = round(statistics.median(seconds), 3)
            if counts := self._conditions.get(size):
                row["conditions"] = dict(sorted(counts.items()))
            if psnr := self._psnr_db.get(size):
                row["lowest_psnr_db"] = round(min(psnr), 2)
            found.append(row)
        return found

    def _picture(self, size: Size, lora: bool, keep: bool = False) -> list[float]:
        """Draw a picture; return its seconds, or nothing if it failed."""
        job = {**JOB, **self._job, "width": size[0], "height": size[1], "steps": self._given.steps}
        if lora:
            job["prompt"] = f"{job['prompt']} <lora:{self._given.lora}:0.5>"
        chosen: dict[str, Any] = {"enabled": self._name == "ours"}
        if self._given.backend:
            chosen["backend"] = self._given.backend
        self.facts["pictures"] += 1
        try:
            drawn: Drawn = self._webui.draw(chosen, "txt2img", **job)
        except WebUIError as exc:
            self.facts["failed"] += 1
            self.facts["errors"].append(f"{size[0]}x{size[1]}: {str(exc)[:300]}")
            print(f"{self._name} {self.facts['errors'][-1]}", flush=True)
            return []
        except OSError as exc:
            raise WebUIError(f"the WebUI does not answer: {exc}") from exc
        if self._probed and (counts := self._webui.get(_CONDITIONS)):
            self._conditions.setdefault(size, Counter()).update(counts)
        if keep:
            self._seconds.setdefault((size, lora), []).append(drawn.seconds)
        self._compare(size, lora, drawn)
        line = f"{self._name} {size[0]}x{size[1]}{' LoRA' * lora}: {drawn.seconds:.2f} s"
        print(line, file=sys.stderr, flush=True)
        return [drawn.seconds]

    def _compare(self, size: Size, lora: bool, drawn: Drawn) -> None:
        """Keep the host's own picture, or compare with it."""
        given = self._given
        name = f"{given.model}-{size[0]}x{size[1]}-{given.batch}-{given.upscale:g}-{lora}.npy"
        path: Path = given.work / f"{given.host}-pictures" / name
        if self._name == "host":
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, drawn.pictures[0])
        elif path.exists():
            own = np.load(path).astype(np.float64)
            found = psnr_db(drawn.pictures[0].astype(np.float64), own)
            self._psnr_db.setdefault(size, []).append(found)
            self.facts["compared"] += 1
        else:
            print("nothing to compare with: let the host draw first", file=sys.stderr, flush=True)

    def _wait_for_builds(self) -> None:
        busy_s, status = wait_until_quiet(self._webui, _BUILD_LIMIT_S)
        self.facts["builds_s"] = round(busy_s, 1)
        if is_active(status):
            self.facts["unfinished"] = status["line"]
        print(f"{self._name}: builds {busy_s:.1f} s, {status['line']}", flush=True)

    def _note_state(self) -> None:
        memory = self._webui.get("/sdapi/v1/memory").get("cuda", {})
        for key in ("reserved", "active", "events"):
            if key in memory:
                self.facts[key] = memory[key]
        if self._name == "ours":
            status = self._webui.status()
            self.facts |= {key: status[key] for key in ("line", "reasons", "captures")}
        print(f"{self._name}: {self.facts}", flush=True)

"""Drawing never waits for builds: ``python -m benchmarks.never_wait --json FILE``.

Draws 40 pictures of 12 sizes on the CPU with an initially empty store. Meanwhile graphs are built
in the background and faults happen: a build worker is killed, one runs out of memory, the user
cancels and resumes, and the disk is full for a while. Each picture is timed against eager at its
size and compared with eager's picture of the same seed.

It does so twice: as the command line draws, which says where a picture begins, and by plain calls
of the pipeline ("plain").

Half of the cores draw, in place of a GPU. Builds use only idle cores, so drawing on all cores
delays them until there is a pause (``--threads``).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from benchmarks.fingerprint import fingerprint
from onediff_ext.cli.library_imports import import_libraries
from onediff_ext.core.demo_files import DEMO_MODEL
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.priority import usable_cores
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session, undo_compile
from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
from onediff_ext.session.session import Session
from onediff_ext.store import durable_write

SIZES = (
    (192, 192), (256, 256), (288, 192), (192, 288), (168, 144), (336, 288),
    (240, 160), (208, 304), (320, 192), (136, 200), (256, 192), (280, 224),
)  # fmt: skip
KILLED, OUT_OF_MEMORY, CANCELLED, RESUMED, DISK_FULL, DISK_FREE = 3, 6, 10, 12, 15, 18
# Allowed difference to eager's picture in levels of 256, from rounding to 8 bits.
ALLOWED_LEVELS = 2


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--threads", type=int, default=max(1, usable_cores() // 2))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import_libraries()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        figures = _measure(arguments, Path(folder))
    text = json.dumps(figures, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    hidden = {"rows": "...", "events": "..."}
    print(json.dumps({**figures, **hidden, "plain": {**figures["plain"], **hidden}}, indent=1))
    return 0


def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    image_generator = ImageGenerator(
        load_checkpoint(arguments.model, dtype=torch.float32, device=torch.device("cpu"))
    )
    settings = DrawSettings(prompt="a cat on a yellow background", steps=arguments.steps)
    chooser = random.Random(0)
    plan = [*SIZES, *(chooser.choice(SIZES) for _ in range(arguments.pictures - len(SIZES)))]
    plan = plan[: arguments.pictures]

    def draw(size: tuple[int, int], seed: int) -> Any:
        return image_generator.txt2img(settings, *size, [seed]).images[0]

    def draw_plain(size: tuple[int, int], seed: int) -> Any:
        return image_generator.pipe(
            settings.prompt, width=size[0], height=size[1], num_inference_steps=settings.steps,
            generator=torch.Generator().manual_seed(seed),
        ).images[0]  # fmt: skip

    image_generator.pipe.set_progress_bar_config(disable=True)
    pipe, backend = image_generator.pipe, arguments.backend
    announced = measure_contender(draw, pipe, plan, backend, folder / "announced")
    plain = measure_contender(draw_plain, pipe, plan, backend, folder / "plain")
    return {
        "what": "never wait",
        "fingerprint": fingerprint(torch.device("cpu")),
        "model": arguments.model.stem,
        "backend": backend,
        "sizes": len(set(plan)),
        "steps": arguments.steps,
        **announced,
        "plain": plain,
    }


def measure_contender(
    draw: Callable[[tuple[int, int], int], Any],
    pipe: Any,
    plan: Sequence[tuple[int, int]],
    backend: str,
    store: Path,
) -> dict[str, Any]:
    """Draw a plan eager, while graphs are built, and eager again; return the figures.

    Args:
        draw: Draws a picture of (width, height) and a seed.
        pipe: The pipeline that it draws with.
        plan: The size of each picture; the seed is its number, from 1.
        backend: Builds the graphs.
        store: An empty folder.
    """
    eager_s: dict[tuple[int, int], list[float]] = {size: [] for size in SIZES}
    expected = _draw_eager(draw, plan, eager_s)
    session = new_session(CompileOptions(backend=backend, store=store))
    compile_pipe(pipe, session=session)
    faults = Faults(session)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for number, size in enumerate(plan, 1):
        faults.before(number)
        before = time.perf_counter()
        drawn = draw(size, number)
        seconds = time.perf_counter() - before
        status = session.status()
        rows.append({
            "width": size[0],
            "height": size[1],
            "seconds": seconds,
            "levels_off": _levels_off(drawn, expected[number - 1]),
            "kinds_ready": status.kinds_ready,
            "kinds_done": status.kinds_ready + status.kinds_failed,
            "kinds_needed": status.kinds_needed,
            "status": status.line(),
        })  # fmt: skip
        shown = f"{size[0]}x{size[1]}"
        print(f"{number}: {shown} {seconds:.2f} s, {status.line()}", file=sys.stderr)
    faults.end()
    drawn_s = time.perf_counter() - start
    finished = session.wait_for_builds(600)
    build_s = time.perf_counter() - start
    states = [kind.state.value for kind in session.kinds]
    events = [event.line() for event in session.event_log.events]
    session.close()
    undo_compile(pipe)
    _draw_eager(draw, plan, eager_s)
    for row in rows:
        row["eager_seconds"] = statistics.median(eager_s[row["width"], row["height"]])
        row["ratio"] = row["seconds"] / row["eager_seconds"]
    equal = sum(row["levels_off"] <= ALLOWED_LEVELS for row in rows)
    done_at = (n for n, row in enumerate(rows, 1) if row["kinds_done"] == row["kinds_needed"])
    return {
        "pictures": len(rows),
        "longest_ratio": max(row["ratio"] for row in rows),
        "median_ratio": statistics.median(row["ratio"] for row in rows),
        "kinds_needed": len(states),
        "kinds_ready": sum(state != KindState.FAILED.value for state in states),
        "kinds_ready_at_picture": next(done_at, None),
        "builder_finished": finished,
        "pictures_equal_eager": equal,
        "all_pictures_equal_eager": equal == len(rows),
        "largest_difference_levels": max(row["levels_off"] for row in rows),
        "drawing_s": drawn_s,
        "until_built_s": build_s,
        "faults": faults.done,
        "rows": rows,
        "events": events,
    }


def _draw_eager(
    draw: Callable[[tuple[int, int], int], Any],
    plan: Sequence[tuple[int, int]],
    eager_s: dict[tuple[int, int], list[float]],
) -> list[Any]:
    """Draw the plan without graphs and record the times; each size at least twice."""
    for size in SIZES:  # the first picture of a size includes allocations and tuning
        draw(size, 0)
    drawn = []
    for number, size in enumerate(plan, 1):
        start = time.perf_counter()
        drawn.append(draw(size, number))
        eager_s[size].append(time.perf_counter() - start)
    return drawn


def _levels_off(drawn: Any, expected: Any) -> int:
    """Return the largest difference of two pictures, in levels of 256."""
    ours, theirs = (numpy.asarray(image, dtype=numpy.int16) for image in (drawn, expected))
    return int(abs(ours - theirs).max())


class Faults:
    """Injects faults, each before one picture.

    Attributes:
        done: Injected faults, with the picture.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._disk = contextlib.ExitStack()
        self._due: list[str] = []
        self.done: list[str] = []

    def before(self, number: int) -> None:
        """Inject the faults that are due before a picture."""
        self._due += {KILLED: ["kill"], OUT_OF_MEMORY: ["memory"]}.get(number, [])
        self._due = [what for what in self._due if not self._hit_a_worker(what, number)]
        if number == CANCELLED:
            self._session.cancel_builds()
            self._note(number, "builds cancelled")
        if number == RESUMED:
            self._session.build_in_background()
            self._note(number, "builds asked for again")
        if number == DISK_FULL:
            self._disk.enter_context(full_disk())
            self._note(number, "the disk is full")
        if number == DISK_FREE:
            self._disk.close()
            self._note(number, "the disk has room again")

    def end(self) -> None:
        """Undo the remaining faults."""
        self._disk.close()
        self.done += [f"{what}: never, no worker lived at that time" for what in self._due]

    def _hit_a_worker(self, what: str, number: int) -> bool:
        run = self._session.builder.run
        pids = run.workers.pids if run is not None else []
        if not pids:
            return False
        if what == "kill":
            os.kill(pids[0], signal.SIGKILL)
            self._note(number, "a worker was killed")
        else:  # the worker and its compilers get no more memory
            pages = Path(f"/proc/{pids[0]}/statm").read_text(encoding="ascii").split()[0]
            used = int(pages) * resource.getpagesize()
            resource.prlimit(pids[0], resource.RLIMIT_AS, (used, used))
            self._note(number, "a worker ran out of memory")
        return True

    def _note(self, number: int, what: str) -> None:
        self.done.append(f"before picture {number}: {what}")
        print(self.done[-1], file=sys.stderr)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Make every write into the store fail as on a full disk, within this ``with`` block."""

    def full(*arguments: Any) -> int:  # noqa: ARG001
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module: Any = durable_write
    before = module.os
    module.os = SimpleNamespace(**{**vars(os), "write": full})
    try:
        yield
    finally:
        module.os = before


if __name__ == "__main__":
    sys.exit(main())

"""Nobody waits: ``python -m benchmarks.never_wait --json FILE``.

Draws 40 pictures of 12 sizes on the CPU with a store that is empty at the start, while the
graphs are built beside them and things go wrong: a build worker is killed, one runs out of
memory, the user cancels and goes on, and the disk is full for a while. Each picture is timed
against eager's time at its size, and compared with eager's picture of the same seed.

Half of the cores draw, in place of a GPU: builds take only what drawing leaves, and who draws on
all cores gets no graphs until there is a pause (``--threads``).
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
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from benchmarks.fingerprint import fingerprint
from onediff_ext.cli.model_arguments import default_model, import_libraries
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.priority import usable_cores
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session, undo_compile
from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn, DrawSettings, ImageGenerator
from onediff_ext.session.session import Session
from onediff_ext.store import durable_write

SIZES = (
    (192, 192), (256, 256), (288, 192), (192, 288), (168, 144), (336, 288),
    (240, 160), (208, 304), (320, 192), (136, 200), (256, 192), (280, 224),
)  # fmt: skip
KILLED, OUT_OF_MEMORY, CANCELLED, RESUMED, DISK_FULL, DISK_FREE = 3, 6, 10, 12, 15, 18
# Levels of 256 by which a picture of graphs may differ from eager's: rounding of 8 bits.
ALLOWED_LEVELS = 2


def main() -> int:
    """Run, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--model", type=Path, default=default_model())
    parser.add_argument("--threads", type=int, default=max(1, usable_cores() // 2))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import_libraries()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        figures = _measure(arguments, Path(folder) / "store")
    text = json.dumps(figures, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({**figures, "rows": "...", "events": "..."}, indent=1))
    return 0


def _measure(arguments: argparse.Namespace, store: Path) -> dict[str, Any]:
    device = torch.device("cpu")
    image_generator = ImageGenerator(
        load_checkpoint(arguments.model, dtype=torch.float32, device=device)
    )
    settings = DrawSettings(prompt="a cat on a yellow background", steps=arguments.steps)
    chooser = random.Random(0)
    plan = [*SIZES, *(chooser.choice(SIZES) for _ in range(arguments.pictures - len(SIZES)))]
    plan = plan[: arguments.pictures]
    eager_s: dict[tuple[int, int], list[float]] = {size: [] for size in SIZES}
    expected = _draw_eager(image_generator, settings, plan, eager_s)

    session = new_session(CompileOptions(backend=arguments.backend, store=store))
    compile_pipe(image_generator.pipe, session=session)
    faults = Faults(session)
    rows: list[dict[str, Any]] = []
    ready_at: int | None = None
    start = time.perf_counter()
    for number, (width, height) in enumerate(plan, 1):
        faults.before(number)
        before = time.perf_counter()
        drawn = image_generator.txt2img(settings, width, height, [number])
        seconds = time.perf_counter() - before
        status = session.status()
        done = status.kinds_ready + status.kinds_failed == status.kinds_needed
        if done and ready_at is None:
            ready_at = number
        rows.append(
            {
                "width": width,
                "height": height,
                "seconds": seconds,
                "levels_off": _levels_off(drawn, expected[number - 1]),
                "kinds_ready": status.kinds_ready,
                "status": status.line(),
            }
        )
        print(f"{number}: {width}x{height} {seconds:.2f} s, {status.line()}", file=sys.stderr)
    faults.end()
    drawn_s = time.perf_counter() - start
    finished = session.wait_for_builds(600)
    build_s = time.perf_counter() - start
    states = sorted(kind.state.value for kind in session.kinds)
    events = [event.line() for event in session.event_log.events]
    session.close()
    undo_compile(image_generator.pipe)
    _draw_eager(image_generator, settings, plan, eager_s)
    for row in rows:
        row["eager_seconds"] = statistics.median(eager_s[row["width"], row["height"]])
        row["ratio"] = row["seconds"] / row["eager_seconds"]
    equal = sum(row["levels_off"] <= ALLOWED_LEVELS for row in rows)
    return {
        "what": "never wait",
        "fingerprint": fingerprint(device),
        "model": arguments.model.stem,
        "backend": arguments.backend,
        "pictures": len(rows),
        "sizes": len(set(plan)),
        "steps": arguments.steps,
        "longest_ratio": max(row["ratio"] for row in rows),
        "median_ratio": statistics.median(row["ratio"] for row in rows),
        "kinds_needed": len(states),
        "kinds_ready": sum(state != KindState.FAILED.value for state in states),
        "kinds_ready_at_picture": ready_at,
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
    image_generator: ImageGenerator,
    settings: DrawSettings,
    plan: list[tuple[int, int]],
    eager_s: dict[tuple[int, int], list[float]],
) -> list[Drawn]:
    """Draw the plan without graphs, and note the times; each size at least twice."""
    for width, height in SIZES:  # the first picture of a size pays for memory and choices
        image_generator.txt2img(settings, width, height, [0])
    drawn = []
    for number, (width, height) in enumerate(plan, 1):
        start = time.perf_counter()
        drawn.append(image_generator.txt2img(settings, width, height, [number]))
        eager_s[width, height].append(time.perf_counter() - start)
    return drawn


def _levels_off(drawn: Drawn, expected: Drawn) -> int:
    """Largest difference of two pictures, in levels of 256."""
    ours, theirs = (numpy.asarray(d.images[0], dtype=numpy.int16) for d in (drawn, expected))
    return int(abs(ours - theirs).max())


class Faults:
    """Things that go wrong, each before one picture.

    Attributes:
        done: What went wrong and when.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._disk = contextlib.ExitStack()
        self._due: list[str] = []
        self.done: list[str] = []

    def before(self, number: int) -> None:
        """Do what is due before a picture."""
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
        """Undo what is left."""
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
        else:  # from now on it gets no memory, and neither do its compilers
            used = (
                int(Path(f"/proc/{pids[0]}/statm").read_text().split()[0]) * resource.getpagesize()
            )
            resource.prlimit(pids[0], resource.RLIMIT_AS, (used, used))
            self._note(number, "a worker ran out of memory")
        return True

    def _note(self, number: int, what: str) -> None:
        self.done.append(f"before picture {number}: {what}")
        print(self.done[-1], file=sys.stderr)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Every write into the store fails as on a full disk."""

    def full(*arguments: Any) -> int:  # noqa: ARG001
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = durable_write.os
    durable_write.os = SimpleNamespace(**{**vars(os), "write": full})  # type: ignore[assignment]
    try:
        yield
    finally:
        durable_write.os = before


if __name__ == "__main__":
    sys.exit(main())

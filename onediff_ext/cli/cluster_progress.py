"""The progress of a run on several GPUs, in one table: pictures, rate, workers, failures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from onediff_ext.cli.tables import format_table
from onediff_ext.cluster.coordinator import WorkerState
from onediff_ext.core.url_secrets import without_secrets_in
from onediff_ext.core.words import duration, printable

_EVERY_S = 0.5  # on a terminal
_LINE_EVERY_S = 10.0  # elsewhere
_MOST_ROWS = 24
_TITLES = ("worker", "where", "GPU", "pictures", "draws with", "state")


class ClusterProgress:
    """Shows a run. On a terminal the table is drawn again in place; elsewhere a line now and then.

    Args:
        needed: Number of pictures.
        as_json: Print lines of JSON on the standard output instead, for another program.
    """

    def __init__(self, needed: int, *, as_json: bool = False) -> None:
        self._needed, self._as_json = needed, as_json
        self.new_paths: list[str] = []
        self.done = self.failed = 0
        self.note = ""
        self._started_at = time.monotonic()
        self._shown_at = self._started_at
        self._rows = 0

    def show(self, workers: Sequence[WorkerState], *, last: bool = False) -> None:
        """Show the present state, unless it was shown a moment ago."""
        now_s, is_terminal = time.monotonic(), sys.stderr.isatty()
        every_s = _EVERY_S if is_terminal or self._as_json else _LINE_EVERY_S
        if not last and now_s - self._shown_at < every_s:
            return
        self._shown_at = now_s
        if self._as_json:
            print(json.dumps(without_secrets_in(self.as_json(workers))), flush=True)
            self.new_paths.clear()
            return
        if not is_terminal:
            print(printable(self.line(workers)), file=sys.stderr, flush=True)
            return
        text = f"{printable(self.line(workers))}\n{worker_table(workers)}"
        back = f"\x1b[{self._rows}F\x1b[J" if self._rows else ""
        self._rows = text.count("\n") + 1
        print(f"{back}{text}", file=sys.stderr, flush=True)

    def as_json(self, workers: Sequence[WorkerState]) -> dict[str, Any]:
        """Return the present state; `new_paths` are those since the last line."""
        return {
            "done": self.done,
            "needed": self._needed,
            "failed": self.failed,
            "note": self.note,
            "paths": self.new_paths,
            "titles": list(_TITLES),
            "workers": worker_rows(workers),
        }

    def line(self, workers: Sequence[WorkerState]) -> str:
        """One line: pictures, rate, time left, workers and failures."""
        seconds = max(1e-3, time.monotonic() - self._started_at)
        rate = self.done / seconds
        alive = sum(not worker.lost for worker in workers)
        parts = [
            f"pictures {self.done}/{self._needed}",
            f"{rate:.2f} a second",
            f"{alive} workers",
        ]
        if 0 < self.done < self._needed:
            parts.append(f"{duration((self._needed - self.done) / rate)} left")
        if lost := len(workers) - alive:
            parts.append(f"{lost} lost")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return ", ".join([*parts, *([self.note] if self.note else [])])


def worker_table(workers: Sequence[WorkerState]) -> str:
    """Return a table with a row for each worker; the first ones of very many."""
    return format_table(list(_TITLES), worker_rows(workers))


def worker_rows(workers: Sequence[WorkerState]) -> list[list[object]]:
    """Return the rows of `worker_table`."""
    return [
        [
            worker.name,
            printable(str(worker.about.get("host", "-"))),
            printable(str(worker.about.get("gpu") or worker.about.get("device", "-"))),
            worker.pictures,
            draws_with(worker),
            printable(worker.lost)[:40] or _state(worker),
        ]
        for worker in workers[-_MOST_ROWS:]
    ]


def _state(worker: WorkerState) -> str:
    if not worker.is_ready:
        return "loading"
    return "drawing" if worker.units else "idle"


def draws_with(worker: WorkerState) -> str:
    """Say what a worker draws with: graphs, eager, or some of both."""
    about = worker.about
    kinds, graphs = about.get("kinds", 0), about.get("built", 0) + about.get("loaded", 0)
    if not about:
        return "-"
    if not graphs:
        return "eager"
    return "graphs" if graphs >= kinds else f"{graphs} of {kinds} graphs"

"""Progress displays: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from onediff_ext.core.words import duration, printable

if TYPE_CHECKING:
    from onediff_ext.building.build_progress import BuildProgress


class Progress:
    """One stage with a known number of units.

    Args:
        what: The text before the numbers, such as ``"pictures"``.
        total: Number of units.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._started_at = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            # Terminals in docker and CI may report no rows and columns; tqdm would draw nothing.
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            width = {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}
            self._bar = tqdm(total=total, desc=what, unit="", leave=True, **width)

    def advance(self, units: int, note: str, seconds_left: float | None = None) -> None:
        """Count finished units; the remaining time is estimated unless it is given."""
        self._done += units
        if self._bar is not None:
            self._bar.set_postfix_str(printable(note), refresh=False)
            self._bar.update(units)
            return
        if seconds_left is None:
            per_unit = (time.monotonic() - self._started_at) / max(1, self._done)
            seconds_left = per_unit * (self._total - self._done)
        left = f", {duration(seconds_left)} left" if self._done < self._total else ""
        line = printable(f"{self._what} {self._done}/{self._total}: {note}{left}")
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the display."""
        if self._bar is not None:
            self._bar.close()


class BuildProgressBars:
    """Shows the progress of builds, with a bar for each run of builds."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def __call__(self, progress: BuildProgress) -> None:
        if self._progress is None:
            self._progress = Progress("building graphs", progress.needed)
        self._progress.advance(1, progress.label, progress.seconds_left)
        if progress.done == progress.needed:
            self._progress.close()
            self._progress = None

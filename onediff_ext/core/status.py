"""What pictures are drawn with now and what is being made: one truth for panel, API and CLI."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STATUS_SCHEMA = 1


@dataclass(frozen=True)
class Status:
    """A moment of one session.

    Args:
        running: What the next picture is drawn with: ``"off"``, ``"eager"``, ``"captured"``
            (eager, replayed as a CUDA graph) or ``"compiled"``.
        kinds_ready: Kinds of the current checkpoint whose graph is in use.
        kinds_failed: Kinds that stay eager for good.
        kinds_needed: Kinds that the current checkpoint has, as far as they were met.
        building: Whether graphs are being built now.
        seconds_left: Of that build, from this machine's history; None when unknown.
        stage: What the builder does: ``""``, ``"reading"``, ``"exporting"``, ``"building"``,
            ``"proving"`` (an imported graph is tried in a process that may die of it), or a stage
            of a warm-up: ``"kinds"``, ``"captures"``, ``"measuring"``.
        sizes_done, sizes_needed: Of a warm-up's list, in its present stage; 0 when there is none.
        building_now: Labels of the kinds in the workers' hands.
        waiting: Kinds that are missing and not being built: cancelled, or nothing may be built.
        cancelled: Whether the user cancelled the builds; they go on when he asks for them.
        captures: CUDA graphs alive.
        speedup: Measured, eager time over compiled time of one step; None when not measured.
        pays_off_after: Pictures after which the builds of this checkpoint's kinds have saved as
            much time as they took; None when not measured, or when graphs save nothing.
        problem: Why builds do not go on as they should (full disk, a worker that died), or ``""``.
        deepcache: What DeepCache did for the last picture, or why it had nothing to do; ``""`` when
            nobody wanted it.
        reasons: Why something runs eager, in plain words, most frequent first.
    """

    running: str = "off"
    kinds_ready: int = 0
    kinds_failed: int = 0
    kinds_needed: int = 0
    building: bool = False
    seconds_left: float | None = None
    stage: str = ""
    sizes_done: int = 0
    sizes_needed: int = 0
    building_now: tuple[str, ...] = ()
    waiting: int = 0
    cancelled: bool = False
    captures: int = 0
    speedup: float | None = None
    pays_off_after: int | None = None
    problem: str = ""
    deepcache: str = ""
    reasons: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for people, such as ``"eager, building 7 of 16 (18 s left)"``."""
        if self.running == "off":
            return self._because("off")
        more = "".join(f"; {text}" for text in (self.deepcache, self.problem) if text)
        return f"{self._drawing()}{self._building()}{more}"

    def as_json(self) -> dict[str, Any]:
        """The fields, and the line for people under ``"line"``."""
        return {
            "schema": STATUS_SCHEMA,
            **asdict(self),
            "building_now": list(self.building_now),
            "reasons": list(self.reasons),
            "line": self.line(),
        }

    def _drawing(self) -> str:
        if self.running == "compiled":
            part = ""
            if self.kinds_ready < self.kinds_needed:
                part = f" in part, {self.kinds_ready} of {self.kinds_needed} graphs"
            gain = "" if self.speedup is None else f" ({self.speedup:.1f}x measured)"
            return f"compiled{part}{gain}"
        # While graphs are being made, that is the reason, and it is said anyway.
        return self.running if self.building else self._because(self.running)

    def _building(self) -> str:
        if self.building:
            done = self.kinds_ready + self.kinds_failed
            left = "" if self.seconds_left is None else f" ({_duration(self.seconds_left)} left)"
            return f", building {done} of {self.kinds_needed}{left}"
        if self.cancelled and self.waiting:
            return f", {self.waiting} not built (cancelled)"
        if self.sizes_needed:
            return f", warming up {self.sizes_done} of {self.sizes_needed} sizes"
        return ""

    def _because(self, what: str) -> str:
        return f"{what}: {self.reasons[0]}" if self.reasons else what


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

"""What pictures are drawn with now and what is being made: one truth for panel, API and CLI."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
        captures: CUDA graphs alive.
        speedup: Measured, eager time over compiled time of one step; None when not measured.
        reasons: Why something runs eager, in plain words, most frequent first.
    """

    running: str = "off"
    kinds_ready: int = 0
    kinds_failed: int = 0
    kinds_needed: int = 0
    building: bool = False
    seconds_left: float | None = None
    captures: int = 0
    speedup: float | None = None
    reasons: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for people, such as ``"building 7 of 16 (18 s left)"``."""
        if self.running == "off":
            return self._because("off")
        if self.building:
            left = "" if self.seconds_left is None else f" ({self.seconds_left:.0f} s left)"
            return f"building {self.kinds_ready + self.kinds_failed} of {self.kinds_needed}{left}"
        if self.running == "compiled":
            part = ""
            if self.kinds_ready < self.kinds_needed:
                part = f" in part, {self.kinds_ready} of {self.kinds_needed} graphs"
            gain = "" if self.speedup is None else f" ({self.speedup:.1f}x measured)"
            return f"compiled{part}{gain}"
        return self._because(self.running)

    def as_json(self) -> dict[str, Any]:
        """The fields, and the line for people under ``"line"``."""
        return {**asdict(self), "reasons": list(self.reasons), "line": self.line()}

    def _because(self, what: str) -> str:
        return f"{what}: {self.reasons[0]}" if self.reasons else what

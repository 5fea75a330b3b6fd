"""What the panel needs from whoever draws: one implementation for WebUIs, one for our own page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onediff_ext.core.status import Status
from onediff_ext.panel.choices import Choices
from onediff_ext.store import GraphLibrary


@dataclass(frozen=True)
class WarmUpStep:
    """A moment of a warm-up.

    Args:
        done, needed: Units of work, graphs and sizes together; 0 of 0 when not known yet.
        note: What is being done, such as ``"512x768"``.
        seconds_left: Estimate; None when there is none.
        summary: What was done in all, in the last step; ``""`` in the others.
    """

    done: int
    needed: int
    note: str
    seconds_left: float | None = None
    summary: str = ""


class PanelHost(ABC):
    """The panel's one way to the outside."""

    @abstractmethod
    def status(self) -> Status:
        """What is true now."""

    @abstractmethod
    def warm_up(self, choices: Choices) -> Iterator[WarmUpStep]:
        """Make everything ready for the sizes of `choices`, step by step.

        Raises:
            OneDiffError: It cannot be done; message and hint are shown.
        """

    @abstractmethod
    def cancel(self) -> None:
        """End a warm-up or build at once; what is finished stays."""

    @abstractmethod
    def library(self) -> GraphLibrary:
        """The graph library that is used now."""

    def machine(self) -> str:
        """Digest of this machine, under which measurements are kept; ``""`` when unknown."""
        return ""

    @abstractmethod
    def picture_folders(self) -> Sequence[Path]:
        """Where finished pictures lie, for proposals of sizes."""

    @abstractmethod
    def off_reason(self) -> str | None:
        """Why OneDiff is off unless somebody turns it on, such as no GPU; None when it is on."""

    def missing_reason(self) -> str | None:
        """What graphs need and is missing here, with the one command that mends it; else None."""
        return None

    def why_no_import(self) -> str | None:
        """Why visitors cannot import graphs, which are native code; None when they can."""
        return None

    def features(self) -> frozenset[str]:
        """Entries of `fields.FEATURES` that can be had."""
        return frozenset()

    @abstractmethod
    def schema(self) -> dict[str, object]:
        """The fields with their defaults and choices, as plain values."""

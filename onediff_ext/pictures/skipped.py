"""What a run left out, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from onediff_ext.core.errors import OneDiffError


@dataclass(frozen=True)
class Skipped:
    """An input that was not used.

    Args:
        path: The file or folder.
        reason: Why, in one or two sentences for the user.
        is_failure: It is a picture that could not be done, not just something else that
            lay in the folder.
    """

    path: Path
    reason: str
    is_failure: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass
class Report:
    """Collects what was skipped while a run goes on."""

    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, path: Path, reason: str | OneDiffError) -> None:
        """Note that `path` is not used, and why."""
        self.skipped.append(Skipped(path, str(reason), isinstance(reason, OneDiffError)))

    @property
    def failures(self) -> list[Skipped]:
        """Pictures that were asked for and could not be done."""
        return [entry for entry in self.skipped if entry.is_failure]

    def extend(self, skipped: Iterable[Skipped]) -> None:
        """Add what another step skipped."""
        self.skipped.extend(skipped)

    def as_json(self) -> list[dict[str, str]]:
        """Return the list as plain values, to be written as JSON."""
        return [{"input": str(entry.path), "reason": entry.reason} for entry in self.skipped]

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.skipped)

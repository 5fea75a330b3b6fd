"""The report of inputs that a run left out, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.url_secrets import without_secrets


@dataclass(frozen=True)
class Skipped:
    """An input that was left out.

    Args:
        path: The file or folder.
        reason: One or two sentences for the user.
        is_failure: It is an image that failed, not just another file in the folder.
    """

    path: Path
    reason: str
    is_failure: bool = False

    def __str__(self) -> str:
        return without_secrets(f"{self.path}: {self.reason}")


@dataclass
class SkipReport:
    """Collects the inputs that a run leaves out."""

    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, path: Path, reason: str | OneDiffError) -> None:
        """Add an input; an error as the reason marks it as a failure."""
        self.skipped.append(Skipped(path, str(reason), isinstance(reason, OneDiffError)))

    @property
    def failures(self) -> list[Skipped]:
        """Images that were asked for and failed."""
        return [entry for entry in self.skipped if entry.is_failure]

    def extend(self, skipped: Iterable[Skipped]) -> None:
        """Add the inputs that another step skipped."""
        self.skipped.extend(skipped)

    def as_json(self) -> list[dict[str, str]]:
        """Return the list as plain values for JSON."""
        return [{"input": str(entry.path), "reason": entry.reason} for entry in self.skipped]

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.skipped)

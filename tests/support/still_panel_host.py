"""A port with nobody behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from onediff_ext.core.errors import OptionError
from onediff_ext.core.status import Status
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.field_schema import schema
from onediff_ext.panel.fields import FEATURES
from onediff_ext.panel.panel_host import PanelHost, WarmUpStep
from onediff_ext.store import GraphLibrary


class StillPanelHost(PanelHost):
    """Warms up by counting; its status is what a test sets."""

    def __init__(self, root: Path) -> None:
        self.now = Status()
        self.root = root
        self.warmed: list[str] = []
        self.cancelled = 0
        self.lacking: str | None = None
        self.no_import: str | None = None

    def status(self) -> Status:
        return self.now

    def warm_up(self, choices: Choices) -> Iterator[WarmUpStep]:
        if not choices.enabled:
            raise OptionError("OneDiff is off.", "Turn it on to warm up.")
        shapes = choices.warm_up_shapes()
        for number, shape in enumerate(shapes, 1):
            self.warmed.append(str(shape))
            yield WarmUpStep(number, len(shapes), str(shape))

    def cancel(self) -> None:
        self.cancelled += 1

    def library(self) -> GraphLibrary:
        return GraphLibrary(self.root / "store", 10**9)

    def picture_folders(self) -> Sequence[Path]:
        return [self.root / "pictures"]

    def off_reason(self) -> str | None:
        return "There is no GPU here."

    def missing_reason(self) -> str | None:
        return self.lacking

    def why_no_import(self) -> str | None:
        return self.no_import

    def features(self) -> frozenset[str]:
        return FEATURES

    def schema(self) -> dict[str, object]:
        return schema(FEATURES)

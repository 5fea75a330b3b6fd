"""A panel host that draws nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from onediff_ext.core.status import Status
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.store import GraphLibrary


class StillPanelHost(PanelHost):
    """Warms up by counting; its status is what a test sets."""

    def __init__(self, root: Path) -> None:
        self.now = Status()
        self.root = root
        self.folders: Sequence[Path] = [root / "pictures"]
        self.warmed: list[str] = []
        self.cancelled = 0
        self.is_paused = self.is_warming_up = False
        self.missing: str | None = None
        self.no_import: str | None = None
        self.memory: str | None = None

    def status(self) -> Status:
        return replace(self.now, paused=self.is_paused, warming_up=self.is_warming_up)

    def warm_up(self, choices: Choices) -> Iterator[str]:
        shapes = self.warm_up_shapes(choices)
        self.is_paused, self.is_warming_up = False, True
        for shape in shapes:
            self.warmed.append(str(shape))
            yield ""
        self.is_warming_up = False
        yield f"Ready: {len(shapes)} sizes."

    def cancel(self) -> None:
        self.cancelled += 1
        self.is_paused = self.is_warming_up = False

    def pause(self) -> None:
        self.is_paused = True

    def go_on(self) -> None:
        self.is_paused = False

    def library(self) -> GraphLibrary:
        return GraphLibrary(self.root / "store", 10**9)

    def device(self) -> torch.device:
        return torch.device("cpu")

    def picture_folders(self) -> Sequence[Path]:
        return self.folders

    def missing_reason(self) -> str | None:
        return self.missing

    def memory_note(self) -> str | None:
        return self.memory

    def no_import_reason(self) -> str | None:
        return self.no_import

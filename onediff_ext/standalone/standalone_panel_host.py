"""The panel's connection to the stand-alone page."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.shapes import BatchShape
from onediff_ext.core.status import Status
from onediff_ext.hosts.diffusers.warmup import pipe_warm_up
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.panel_host import PanelHost, WarmUpStep
from onediff_ext.session.warm_up_passes import WarmUpControl, in_passes
from onediff_ext.session.warm_up_report import WarmUpProgress, WarmUpReport
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.store import GraphLibrary

if TYPE_CHECKING:
    import torch

_STAGES = {"kinds": "building", "captures": "capturing", "measuring": "measuring"}


class StandalonePanelHost(PanelHost):
    """The stand-alone page as the panel sees it.

    Args:
        standalone_app: Draws the pictures.
        output_dir: The folder of finished pictures.
        is_local: Only this machine's own users reach the page.
    """

    def __init__(
        self, standalone_app: StandaloneApp, output_dir: Path, *, is_local: bool = True
    ) -> None:
        self.standalone_app, self._output_dir, self._is_local = standalone_app, output_dir, is_local
        self._warming = WarmUpControl()

    def status(self) -> Status:
        return self.standalone_app.status()

    def cancel(self) -> None:
        session = self.standalone_app.session
        if not self._warming.cancel() and session is not None:
            session.cancel_builds()

    def pause(self) -> None:
        self.standalone_app.pause_builds()

    def go_on(self) -> None:
        self.standalone_app.go_on_with_builds()

    def no_import_reason(self) -> str | None:
        if self._is_local:
            return None
        return "Import is off because others can reach this page: use `onediff-ext graphs import`."

    def library(self) -> GraphLibrary:
        return self.standalone_app.library

    def device(self) -> torch.device:
        return self.standalone_app.device

    def picture_folders(self) -> Sequence[Path]:
        return [self._output_dir]

    def warm_up(self, choices: Choices) -> Iterator[WarmUpStep]:
        shapes = self.warm_up_shapes(choices)
        steps: queue.SimpleQueue[WarmUpStep | BaseException | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._work, args=(choices, shapes, steps), name="onediff-warm-up", daemon=True
        )
        if self.standalone_app.are_builds_paused:
            self.go_on()
        yield WarmUpStep(0, 0, "looking for graphs")
        self._warming.start()
        thread.start()
        while (step := steps.get()) is not None:
            if isinstance(step, BaseException):
                raise step
            yield step

    def _work(
        self,
        choices: Choices,
        shapes: list[BatchShape],
        steps: queue.SimpleQueue[WarmUpStep | BaseException | None],
    ) -> None:
        def listen(progress: WarmUpProgress) -> None:
            note = f"{_STAGES[progress.stage]} {progress.label}".strip()
            steps.put(WarmUpStep(progress.done, progress.needed, note, progress.seconds_left))

        def one_pass(left: list[BatchShape]) -> WarmUpReport:
            with self.standalone_app.turn():
                if self._warming.is_cancelled:
                    return WarmUpReport(cancelled=True)
                image_generator = self.standalone_app.loaded()
                self.standalone_app.apply(choices)
                warm_up = pipe_warm_up(
                    image_generator.pipe, left, listen, self.standalone_app.is_waited_for
                )
                return self._warming.run(warm_up)

        try:
            report = in_passes(shapes, one_pass, lambda: self._warming.is_cancelled)
            if report is not None:
                steps.put(WarmUpStep(1, 1, "done", summary=report.line()))
        except BaseException as exc:
            steps.put(exc)
        steps.put(None)

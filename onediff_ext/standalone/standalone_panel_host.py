"""The panel's connection to the stand-alone page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.core.status import Status
from onediff_ext.hosts.diffusers.warmup import pipe_warm_up
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.panel.phrases import Phrases
from onediff_ext.panel.warm_up_run import WarmUpRun
from onediff_ext.session.warm_up_passes import WarmUpControl, in_passes
from onediff_ext.session.warm_up_report import WarmUpReport
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.standalone.page_language import visitors_phrases
from onediff_ext.store import GraphLibrary

if TYPE_CHECKING:
    import torch


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
        self._control, self._warm_up = WarmUpControl(), WarmUpRun()

    def status(self) -> Status:
        return replace(
            self.standalone_app.status(),
            warming_up=self._warm_up.is_running,
            paused=self.standalone_app.are_builds_paused,
        )

    def cancel(self) -> None:
        self._control.cancel()
        self.standalone_app.cancel_builds()

    def pause(self) -> None:
        self.standalone_app.pause_builds()

    def go_on(self) -> None:
        self.standalone_app.go_on_with_builds()

    def no_import_reason(self) -> str | None:
        if self._is_local:
            return None
        return "Import is off because others can reach this page: use `onediff-ext graphs import`."

    def phrases(self) -> Phrases:
        return visitors_phrases()

    def library(self) -> GraphLibrary:
        return self.standalone_app.library

    def device(self) -> torch.device:
        return self.standalone_app.device

    def picture_folders(self) -> Sequence[Path]:
        return [self._output_dir]

    def warm_up(self, choices: Choices) -> Iterator[str]:
        shapes = self.warm_up_shapes(choices)

        def one_pass(left: list[BatchShape]) -> WarmUpReport:
            with self.standalone_app.turn():
                if self._control.is_cancelled:
                    return WarmUpReport(cancelled=True)
                image_generator = self.standalone_app.loaded()
                self.standalone_app.apply(choices)
                warm_up = pipe_warm_up(
                    image_generator.pipe,
                    left,
                    give_way=self.standalone_app.is_waited_for,
                    measured_before=len(shapes) - len(left),
                    guidance_steps=GuidanceOptions.parse(choices.guidance_steps),
                )
                return self._control.run(warm_up)

        def work() -> WarmUpReport:
            if self.standalone_app.are_builds_paused:
                self.go_on()
            self._control.start()
            report = in_passes(shapes, one_pass, lambda: self._control.is_cancelled)
            assert report is not None  # there is a size, and each pass has a result
            return report

        yield from self._warm_up.steps(work, self.phrases())

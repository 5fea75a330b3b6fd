"""The panel's port to the stand-alone studio."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from onediff_ext.backends.registry import why_no_graphs
from onediff_ext.core.errors import OptionError
from onediff_ext.core.shapes import BatchShape
from onediff_ext.core.status import Status
from onediff_ext.engine.machine import machine_digest
from onediff_ext.hosts.diffusers.warmup import pipe_warm_up
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.field_schema import schema
from onediff_ext.panel.fields import FEATURES
from onediff_ext.panel.panel_host import PanelHost, WarmUpStep
from onediff_ext.panel.warm_up_sizes import recent_sizes
from onediff_ext.session.warm_up import WarmUpControl, WarmUpProgress, WarmUpReport, in_passes
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.store import GraphLibrary

_STAGES = {"kinds": "building", "captures": "capturing", "measuring": "measuring"}


class StandalonePanelHost(PanelHost):
    """The studio as the panel sees it.

    Args:
        standalone_app: Draws.
        output_dir: Where finished pictures lie.
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

    def why_no_import(self) -> str | None:
        if self._is_local:
            return None
        return "Import is off because others can reach this page: use `onediff-ext graphs import`."

    def features(self) -> frozenset[str]:
        return FEATURES

    def library(self) -> GraphLibrary:
        return self.standalone_app.library

    def machine(self) -> str:
        return machine_digest(self.standalone_app.device)

    def picture_folders(self) -> Sequence[Path]:
        return [self._output_dir]

    def off_reason(self) -> str | None:
        if self.standalone_app.device.type == "cuda":
            return None
        return "There is no GPU here, where graphs win little: off unless you turn it on."

    def missing_reason(self) -> str | None:
        return why_no_graphs(self.standalone_app.device)

    def schema(self) -> dict[str, object]:
        return schema(FEATURES)

    def warm_up(self, choices: Choices) -> Iterator[WarmUpStep]:
        if not choices.enabled:
            raise OptionError("OneDiff is off.", "Turn it on to warm up.")
        steps: queue.SimpleQueue[WarmUpStep | BaseException | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._work, args=(choices, steps), name="onediff-warm-up", daemon=True
        )
        yield WarmUpStep(0, 0, "looking for graphs")
        self._warming.start()
        thread.start()
        while (step := steps.get()) is not None:
            if isinstance(step, BaseException):
                raise step
            yield step

    def _work(
        self, choices: Choices, steps: queue.SimpleQueue[WarmUpStep | BaseException | None]
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
            report = in_passes(self._shapes(choices), one_pass, lambda: self._warming.is_cancelled)
            if report is not None:
                steps.put(WarmUpStep(1, 1, "done", summary=report.line()))
        except BaseException as exc:
            steps.put(exc)
        steps.put(None)

    def _shapes(self, choices: Choices) -> list[BatchShape]:
        shapes = choices.warm_up_shapes() or recent_sizes(self.picture_folders())
        if not shapes:
            raise OptionError("There is no size to warm up.", 'Write for example "512x768".')
        return shapes

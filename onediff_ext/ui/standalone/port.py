"""The panel's port to the stand-alone studio."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from onediff_ext.core.errors import OptionError
from onediff_ext.core.status import Status
from onediff_ext.hosts.diffusers.probe import probe
from onediff_ext.hosts.diffusers.step_bench import time_steps
from onediff_ext.service.builder import BuildProgress
from onediff_ext.store import GraphLibrary
from onediff_ext.ui.choices import Choices
from onediff_ext.ui.port import PanelPort, WarmUpStep
from onediff_ext.ui.schema import schema
from onediff_ext.ui.standalone.studio import Studio


class StudioPort(PanelPort):
    """The studio as the panel sees it.

    Args:
        studio: Draws.
        output_dir: Where finished pictures lie.
    """

    def __init__(self, studio: Studio, output_dir: Path) -> None:
        self.studio, self._output_dir = studio, output_dir

    def status(self) -> Status:
        return self.studio.status()

    def cancel(self) -> None:
        self.studio.cancel()

    def library(self) -> GraphLibrary:
        return self.studio.library

    def picture_folders(self) -> Sequence[Path]:
        return [self._output_dir]

    def why_off(self) -> str | None:
        if self.studio.device.type == "cuda":
            return None
        return "There is no GPU here, where graphs win little: off unless you turn it on."

    def schema(self) -> dict[str, object]:
        return schema()

    def warm_up(self, choices: Choices) -> Iterator[WarmUpStep]:
        if not choices.enabled:
            raise OptionError("OneDiff is off.", "Turn it on to warm up.")
        steps: queue.SimpleQueue[WarmUpStep | BaseException | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._work, args=(choices, steps), name="onediff-warm-up", daemon=True
        )
        yield WarmUpStep(0, 0, "looking for graphs")
        thread.start()
        while (step := steps.get()) is not None:
            if isinstance(step, BaseException):
                raise step
            yield step

    def _work(
        self, choices: Choices, steps: queue.SimpleQueue[WarmUpStep | BaseException | None]
    ) -> None:
        try:
            with self.studio.turn():
                self._warm_up(choices, steps)
        except BaseException as exc:
            steps.put(exc)
        steps.put(None)

    def _warm_up(
        self, choices: Choices, steps: queue.SimpleQueue[WarmUpStep | BaseException | None]
    ) -> None:
        shapes = choices.warm_up_shapes()
        painter = self.studio.loaded()
        self.studio.apply(choices)
        session = self.studio.session
        assert session is not None

        def listen(progress: BuildProgress) -> None:
            needed = progress.needed + len(shapes)
            steps.put(WarmUpStep(progress.done, needed, progress.label, progress.seconds_left))
            self.studio.check_cancelled()

        session.listener = listen
        try:
            probe(painter.pipe)
            probe(painter.pipe)  # compares the new graphs with eager
        finally:
            session.listener = None
        for number, shape in enumerate(shapes, 1):
            self.studio.check_cancelled()
            timing = time_steps(painter.pipe, shape, rounds=1)
            self.studio.speedup = timing.speedup
            steps.put(WarmUpStep(number, len(shapes), str(shape)))

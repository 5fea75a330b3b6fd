"""The part of a folder that another GPU draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onediff_ext.pictures.batch.batch_drawer import (
    BatchToDraw,
    DrawerLostError,
    DrawnBatch,
    FurtherDrawer,
    WrittenPicture,
)
from onediff_ext.webui.batch_job import HostDrawer
from onediff_ext.webui.host_access import further_gpus
from onediff_ext.webui.other_gpus.host_job import check_sendable, draw_message, script_layout
from onediff_ext.webui.other_gpus.host_process import HostProcess, host_command
from onediff_ext.webui.other_gpus.messages import Layout


def drawers_on_other_gpus(p: Any, count: int, drawer: HostDrawer) -> list[FurtherDrawer[None]]:
    """Return a drawer on each further GPU, at most one for each further batch.

    Args:
        p: The host's img2img processing object of the run.
        count: Further GPUs; processes on a machine without GPUs.
        drawer: Draws on the host's own GPU.

    Raises:
        OptionError: The job cannot be sent to another process.
    """
    count = min(count, drawer.batch_count - 1)
    if count < 1:
        return []
    from modules import paths_internal, shared

    check_sendable(p)
    command = host_command(Path(paths_internal.script_path) / "launch.py")
    options = dict(shared.opts.data)
    layout, checkpoint = script_layout(p.scripts), str(options.get("sd_model_checkpoint") or "")
    return [
        OtherGPUDrawer(name, drawer, HostProcess(gpu, command, options), layout, checkpoint)
        for name, gpu in further_gpus(count)
    ]


class OtherGPUDrawer(FurtherDrawer[None]):
    """Has batches of the host's drawer drawn by a process on another GPU.

    Args:
        name: Of the GPU, as the summary shows it.
        drawer: Draws on the host's own GPU; knows the job and gets the results.
        process: Not started yet.
        layout: Of the host's scripts.
        checkpoint: The title of the host's checkpoint when the run began, or "".
    """

    def __init__(
        self,
        name: str,
        drawer: HostDrawer,
        process: HostProcess,
        layout: Layout,
        checkpoint: str,
    ) -> None:
        self._name, self._drawer, self._process = name, drawer, process
        self._layout, self._checkpoint = layout, checkpoint

    def open(self, is_wanted: Callable[[], bool]) -> bool:
        layout = self._process.start(is_wanted)
        if layout is not None and layout != self._layout:
            raise DrawerLostError("the WebUI there has other scripts")
        # It draws nothing before the host's model is known: a folder's pictures have one model.
        return layout is not None and self._drawer.wait_for_model(is_wanted)

    def is_stopped(self) -> bool:
        return self._drawer.is_stopped()

    def draw(self, batch: BatchToDraw) -> Iterator[DrawnBatch[None]]:
        message = draw_message(self._drawer.host_job(batch), self._checkpoint)
        answer = self._process.draw(message, self._drawer.is_interrupted)
        if answer is None:
            return
        if answer.model != self._drawer.model:
            raise DrawerLostError(f"the WebUI there draws with another model: {answer.model}")
        drawn = self._drawer.drawn_batch(batch, answer.images, answer.infotexts)
        if drawn.pictures:
            self._drawer.count(self._name, len(drawn.pictures))
            yield drawn

    def on_written(self, drawn: DrawnBatch[None], picture: WrittenPicture) -> None:
        self._drawer.on_written(drawn, picture)

    def on_lost(self, exc: DrawerLostError) -> None:
        self._drawer.lose(self._name, str(exc))

    def close(self) -> None:
        self._process.close()

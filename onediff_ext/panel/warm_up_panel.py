"""The buttons beside the list of warm-up sizes, and the progress below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradio as gr

from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.shapes import BatchShape, nearest_side_px
from onediff_ext.panel import html
from onediff_ext.panel.choices import Choices, from_arguments
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.panel.warm_up_sizes import merge_sizes, recent_sizes


class WarmUpButtons:
    """The buttons; `connect` gives them their work once the panel is complete.

    Args:
        elem_id: Makes an element's id from a name.
    """

    def __init__(self, elem_id: Callable[[str], str]) -> None:
        with gr.Row():
            self.add = gr.Button("Add current size", size="sm", elem_id=elem_id("add_size"))
            self.recent = gr.Button(
                "From recent images", size="sm", elem_id=elem_id("recent_sizes")
            )
            self.start = gr.Button(
                "Warm up now", size="sm", variant="primary", elem_id=elem_id("warm_up")
            )
            self.stop = gr.Button("Cancel", size="sm", elem_id=elem_id("cancel"))
        self.progress = gr.HTML("", elem_id=elem_id("progress"))
        self._sizes: Any = None

    def connect(
        self,
        port: PanelHost,
        sizes: Any,
        inputs: Sequence[Any],
        status_outputs: Sequence[Any],
        show_status: Callable[[bool], list[str]],
    ) -> None:
        """Give all buttons but "Add current size" their work.

        Args:
            port: Who warms up.
            sizes: The list of sizes.
            inputs: All controls, in the order of `FIELDS`.
            status_outputs, show_status: Where the status goes, and its making.
        """
        self._sizes = sizes

        def propose(text: str) -> tuple[Any, str]:
            found = recent_sizes(port.picture_folders())
            if not found:
                return gr.update(), html.message("There are no pictures in the output folders yet.")
            return _merged(text, found)

        def warm_up(*values: Any) -> Iterator[list[Any]]:
            for shown in _warm_up(port, values):
                yield [shown, *show_status(values[0])]

        def cancel() -> str:
            port.cancel()
            return html.message("Cancelled; what was finished stays.")

        self.recent.click(
            propose,
            inputs=[sizes],
            outputs=[sizes, self.progress],
            show_progress="hidden",
        )
        outputs = [self.progress, *status_outputs]
        self.start.click(warm_up, inputs=list(inputs), outputs=outputs, show_progress="hidden")
        # Past the queue, where the warm-up itself may hold the only place.
        self.stop.click(cancel, outputs=[self.progress], queue=False, show_progress="hidden")

    def connect_size(self, width: Any, height: Any, batch: Any) -> None:
        """Let "Add current size" read the host's own controls of size and batch size."""

        def add(text: str, width_px: float, height_px: float, count: float) -> tuple[Any, str]:
            shape = BatchShape(
                nearest_side_px(int(width_px)), nearest_side_px(int(height_px)), int(count)
            )
            return _merged(text, [shape])

        inputs = [self._sizes, width, height, batch]
        outputs = [self._sizes, self.progress]
        self.add.click(add, inputs=inputs, outputs=outputs, show_progress="hidden")


def _merged(text: str, more: Sequence[BatchShape]) -> tuple[Any, str]:
    try:
        return merge_sizes(text, more), ""
    except OneDiffError as exc:
        return gr.update(), html.error(exc)


def _warm_up(port: PanelHost, values: Sequence[Any]) -> Iterator[str]:
    """What the progress shows, moment by moment."""
    try:
        choices = Choices.parse(from_arguments(values))
        summary = ""
        for step in port.warm_up(choices):
            summary = step.summary
            yield html.progress_bar(step)
    except OneDiffError as exc:
        yield html.error(exc)
        return
    yield html.message(summary or "Ready.")

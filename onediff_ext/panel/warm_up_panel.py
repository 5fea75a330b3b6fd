"""The list of sizes with the buttons that build graphs, and their progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradio as gr

from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.shapes import BatchShape, parse_sizes
from onediff_ext.panel import html
from onediff_ext.panel.build_buttons import build_buttons
from onediff_ext.panel.choices import Choices, from_arguments
from onediff_ext.panel.control_values import to_control
from onediff_ext.panel.fields import BY_NAME
from onediff_ext.panel.gradio_versions import chips, script_argument
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.panel.size_list import read_tab_size, with_sizes_added
from onediff_ext.panel.size_source import SizeSource


class WarmUpPanel:
    """The chips and buttons; `connect` attaches their events once the panel is complete.

    Args:
        panel_host: Builds.
        sources: The tabs whose size a click adds; the first is the panel's own tab.
        elem_id: Makes an element's id from a name.

    Attributes:
        sizes: The chips, a control of the field "sizes".
        progress: The progress bar.
        buttons: In the order of `BuildButtons`.
    """

    def __init__(
        self,
        panel_host: PanelHost,
        sources: Sequence[SizeSource],
        elem_id: Callable[[str], str],
    ) -> None:
        self._host, self._sources = panel_host, sources
        field = BY_NAME["sizes"]
        with gr.Row(elem_id=elem_id("size_row")):
            self.sizes = chips(
                label=field.label, info=field.help, scale=3, elem_id=elem_id("sizes")
            )
            self._typed = gr.Textbox(
                label="Another size",
                info="@2: two at once",
                placeholder="512x768@2",
                max_lines=1,
                scale=1,
                min_width=140,
                elem_id=elem_id("another_size"),
            )
        # A page's script fills it: no server knows the sliders of another tab.
        self._tab_size = gr.Textbox("", visible=False, elem_id=elem_id("tab_size"))
        with gr.Row(elem_id=elem_id("size_buttons"), elem_classes=["onediff-buttons"]):
            self._add = [
                gr.Button(source.label, size="sm", elem_id=elem_id(f"add_size_{number}"))
                for number, source in enumerate(sources)
            ]
            self._recent = gr.Button("Recent images", size="sm", elem_id=elem_id("recent_sizes"))
        with gr.Row(elem_id=elem_id("build_buttons"), elem_classes=["onediff-buttons"]):
            shown = build_buttons(panel_host.status())
            self._start = gr.Button(
                "Build now",
                size="sm",
                variant="primary",
                interactive=shown.build_now,
                elem_id=elem_id("warm_up"),
            )
            self._pause, self._go_on, self._cancel = (
                gr.Button(
                    label,
                    size="sm",
                    visible=visible,
                    elem_id=elem_id(name),
                    elem_classes=["onediff-appears"],
                )
                for label, visible, name in (
                    ("Pause", shown.pause, "pause"),
                    ("Go on", shown.go_on, "go_on"),
                    ("Cancel", shown.cancel, "cancel"),
                )
            )
        self.buttons = [self._start, self._pause, self._go_on, self._cancel]
        self.progress = gr.HTML("", elem_id=elem_id("progress"))
        self._message = gr.HTML("", elem_id=elem_id("build_message"))

    def connect(
        self,
        inputs: Sequence[Any],
        status_outputs: Sequence[Any],
        show_status: Callable[[bool], list[Any]],
    ) -> None:
        """Attach the events of all buttons.

        Args:
            inputs: All controls, in the order of `FIELDS`.
            status_outputs: Components that show the status.
            show_status: Makes the status for them.
        """
        self._connect_sizes()

        def warm_up(*values: Any) -> Iterator[list[Any]]:
            *given, typed, tab_size = values
            for shown in self._warm_up(given, typed, tab_size):
                yield [*shown, *show_status(given[0])]

        self._start.click(
            warm_up,
            inputs=[*inputs, self._typed, self._tab_size],
            outputs=[self.sizes, self._typed, self._message, *status_outputs],
            show_progress="hidden",
            **script_argument(self._start.click, self._sources[0].reading_script(len(inputs) + 2)),
        )

        def pause(enabled: bool) -> list[Any]:
            self._host.pause()
            return ["", *show_status(enabled)]

        def go_on(enabled: bool) -> list[Any]:
            self._host.go_on()
            return ["", *show_status(enabled)]

        def cancel(enabled: bool) -> list[Any]:
            self._host.cancel()
            return show_status(enabled)

        # What builds do stands in the status, so that it never outlives its truth. A warm-up says
        # itself how it ended, also after a cancel.
        for button, action, outputs in (
            (self._pause, pause, [self._message, *status_outputs]),
            (self._go_on, go_on, [self._message, *status_outputs]),
            (self._cancel, cancel, status_outputs),
        ):
            # Outside the queue: the warm-up itself may occupy the queue's only slot.
            button.click(
                action, inputs=[inputs[0]], outputs=outputs, queue=False, show_progress="hidden"
            )

    def _connect_sizes(self) -> None:
        shown = [self.sizes, self._message]

        def add(sizes: list[str] | None, tab_size: str) -> list[Any]:
            shape = read_tab_size(tab_size)
            return _added(sizes, [] if shape is None else [shape])

        def propose(sizes: list[str] | None) -> list[Any]:
            found = self._host.recent_sizes()
            if not found:
                missing = "There are no pictures in the output folders yet."
                return [gr.update(), html.message(missing, self._host.phrases())]
            return _added(sizes, found)

        def add_typed(sizes: list[str] | None, typed: str) -> list[Any]:
            if not (typed or "").strip():
                return [gr.update(), gr.update(), gr.update()]
            try:
                return [*_added(sizes, parse_sizes(typed)), ""]
            except OneDiffError as exc:
                return [gr.update(), html.error(exc, self._host.phrases()), gr.update()]

        for button, source in zip(self._add, self._sources, strict=True):
            button.click(
                add,
                inputs=[self.sizes, self._tab_size],
                outputs=shown,
                show_progress="hidden",
                **script_argument(button.click, source.reading_script(inputs=2)),
            )
        self._recent.click(propose, inputs=[self.sizes], outputs=shown, show_progress="hidden")
        for commit in (self._typed.submit, self._typed.blur):
            commit(
                add_typed,
                inputs=[self.sizes, self._typed],
                outputs=[*shown, self._typed],
                show_progress="hidden",
            )

    def _warm_up(
        self, values: Sequence[Any], typed: str, tab_size: str
    ) -> Iterator[tuple[Any, Any, str]]:
        """Warm up the chips' sizes and a typed one; without any, the size of the tab.

        Yields:
            Updates of the chips, of the typed size and of the message.
        """
        given = from_arguments(values)
        chips_update: Any = gr.update()
        typed_update: Any = gr.update()
        try:
            more = parse_sizes(typed or "")
            if more:
                before = to_control(BY_NAME["sizes"], str(given.get("sizes") or ""))
                sizes = with_sizes_added(before, more)
                given["sizes"] = ", ".join(sizes)
                chips_update, typed_update = gr.update(choices=sizes, value=sizes), ""
            shape = read_tab_size(tab_size or "")
            if not given.get("sizes") and shape is not None:
                given["sizes"] = str(shape)
            for result in self._host.warm_up(Choices.parse(given)):
                yield chips_update, typed_update, html.message(result)
                chips_update, typed_update = gr.update(), gr.update()
        except OneDiffError as exc:
            yield chips_update, typed_update, html.error(exc, self._host.phrases())


def _added(sizes: Sequence[str] | None, more: Sequence[BatchShape]) -> list[Any]:
    """Updates of the chips and of the message below them."""
    shown = with_sizes_added(sizes or [], more)
    return [gr.update(choices=shown, value=shown), ""]

"""The technical details, and a button that copies a report for an issue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from onediff_ext.panel.choices import from_arguments
from onediff_ext.panel.gradio_versions import script_argument
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.panel.report import report_text

# Pages without a certificate have no clipboard: the text box stays, to be copied by hand.
_COPY = "text => { navigator.clipboard && navigator.clipboard.writeText(text); }"


class ReportPanel:
    """A closed accordion with the engine's own texts.

    Args:
        panel_host: The program that draws.
        technical: The HTML of the technical details at first.
        elem_id: Makes an element's id from a name.

    Attributes:
        technical: The component for that HTML.
    """

    def __init__(
        self, panel_host: PanelHost, technical: str, elem_id: Callable[[str], str]
    ) -> None:
        self._host = panel_host
        with gr.Accordion("Technical details", open=False, elem_id=elem_id("technical")):
            self.technical = gr.HTML(technical, elem_id=elem_id("technical_text"))
            self._copy = gr.Button(
                "Copy a report for an issue", size="sm", elem_id=elem_id("copy_report")
            )
            self._report = gr.Textbox(
                label="Report", lines=6, max_lines=12, visible=False, elem_id=elem_id("report")
            )

    def connect(self, inputs: Sequence[Any]) -> None:
        """Attach the button's events.

        Args:
            inputs: All controls, in the order of `FIELDS`.
        """

        def report(*values: Any) -> Any:
            text = report_text(self._host.status(), self._host.name(), from_arguments(values))
            return gr.update(value=text, visible=True)

        made = self._copy.click(
            report, inputs=list(inputs), outputs=[self._report], show_progress="hidden"
        )
        made.then(None, inputs=[self._report], **script_argument(made.then, _COPY))

"""The accordion "OneDiff" of txt2img and img2img, and what it does around each job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gradio as gr
from modules import scripts, shared, ui_components

from onediff_ext.core.errors import OneDiffError
from onediff_ext.panel import html
from onediff_ext.panel.choices import Choices, from_arguments
from onediff_ext.panel.fields import fields_for
from onediff_ext.panel.panel import Panel, build_panel
from onediff_ext.webui import extension
from onediff_ext.webui.paste import infotext_fields
from onediff_ext.webui.settings import HOST_FEATURES
from onediff_ext.webui.webui_panel_host import WebUIPanelHost
from onediff_ext.webui.xyz import axis_values

logger = logging.getLogger(__name__)
PORT = WebUIPanelHost(extension.current)


class OneDiffScript(scripts.Script):
    """Graphs under the sampler's models, for the length of each job that asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self._panel: Panel | None = None
        self._sizes: dict[str, Any] = {}

    def title(self) -> str:
        return "OneDiff"

    def show(self, is_img2img: bool) -> Any:
        tab = "img2img" if is_img2img else "txt2img"
        for name in ("width", "height", "batch_size"):
            self.on_after_component(self._found(name), elem_id=f"{tab}_{name}")
        return scripts.AlwaysVisible

    def ui(self, is_img2img: bool) -> list[Any]:
        tab = "img2img" if is_img2img else "txt2img"

        def elem_id(name: str) -> str:
            return f"onediff_{tab}_{name}"

        enabled_by_default = PORT.off_reason() is None
        if hasattr(ui_components, "InputAccordion"):
            frame = ui_components.InputAccordion(
                enabled_by_default, label="OneDiff", elem_id=f"onediff_{tab}"
            )
            with frame as enabled:
                with enabled.extra():
                    header = _header(elem_id)
                panel = build_panel(PORT, enabled, header, elem_id)
                _refresh(panel, elem_id)
        else:
            with gr.Accordion("OneDiff", open=False, elem_id=f"onediff_{tab}"):
                enabled = gr.Checkbox(
                    enabled_by_default, label="Enable OneDiff", elem_id=elem_id("enabled")
                )
                panel = build_panel(PORT, enabled, _header(elem_id), elem_id)
                _refresh(panel, elem_id)
        self._panel = panel
        self._connect_size()
        self.infotext_fields = infotext_fields(panel.controls)
        self.paste_field_names = [
            field.infotext for field in fields_for(HOST_FEATURES) if field.infotext
        ]
        return panel.inputs

    def process(self, p: Any, *args: Any) -> None:
        """Before anything of a job is drawn or encoded."""
        state = extension.current()
        try:
            values = {**from_arguments(args), **axis_values(p)}
            choices = Choices.parse(values)
            choices.check_features(HOST_FEATURES)
            reason = state.begin(p, choices)
        except OneDiffError as exc:
            state.refuse(p, str(exc))
            logger.warning("This picture is drawn without OneDiff: %s", exc)
            return
        if state.settings.get("onediff_infotext"):
            p.extra_generation_params.update(choices.infotext())
        if reason and state.stops(choices):
            message = f"OneDiff stopped this: {reason}."
            logger.warning("%s", message)
            p.comment(message)
            shared.state.interrupt()

    def process_before_every_sampling(self, p: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        extension.current().acceleration.before_sampling(p)

    def post_sample(self, p: Any, ps: Any, *args: Any) -> None:  # noqa: ARG002
        extension.current().acceleration.after_sampling(p)

    def postprocess(self, p: Any, processed: Any, *args: Any) -> None:  # noqa: ARG002
        extension.current().acceleration.end(p)

    def _found(self, name: str) -> Any:
        def remember(on: Any) -> None:
            self._sizes[name] = on.component
            self._connect_size()

        return remember

    def _connect_size(self) -> None:
        """Once all are there; which comes first is the user's choice in the settings."""
        if self._panel is not None and len(self._sizes) == 3:
            self._panel.warm_up.connect_size(
                self._sizes["width"], self._sizes["height"], self._sizes["batch_size"]
            )
            self._sizes = {}


def changes_of_job(p: Any) -> dict[str, str]:
    """What a job asks for that changes pictures; empty for none, or if it cannot be read."""
    for script in getattr(getattr(p, "scripts", None), "alwayson_scripts", ()):
        if isinstance(script, OneDiffScript):
            arguments = p.script_args[script.args_from : script.args_to]
            try:
                choices = Choices.parse({**from_arguments(arguments), **axis_values(p)})
            except OneDiffError:
                break  # drawn without
            return choices.changes()
    return {}


def _header(elem_id: Callable[[str], str]) -> Any:
    return gr.HTML(
        html.status_line(PORT.status()),
        elem_id=elem_id("header"),
        elem_classes=["onediff-header-status"],
    )


def _refresh(panel: Panel, elem_id: Callable[[str], str]) -> None:
    gr.HTML(html.style_element())
    # Gradio 3.41 has no timer: javascript/onediff.js presses this.
    button = gr.Button("", elem_id=elem_id("refresh"), elem_classes=["onediff-hidden"])
    button.click(
        panel.show_status,
        inputs=[panel.controls["enabled"]],
        outputs=panel.status_outputs,
        queue=False,
        show_progress="hidden",
    )

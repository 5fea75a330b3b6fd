"""The always-visible script: the accordion "OneDiff" of txt2img and img2img, and its job hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gradio as gr
from modules import scripts, shared, ui_components

from onediff_ext.core.errors import OneDiffError
from onediff_ext.panel import html
from onediff_ext.panel.choices import Choices, from_arguments, on_failure_of
from onediff_ext.panel.fields import fields_for
from onediff_ext.panel.infotext_entries import NAMES as INFOTEXT_NAMES
from onediff_ext.panel.infotext_entries import infotext_entries
from onediff_ext.panel.panel import Panel, build_panel
from onediff_ext.panel.size_source import tab_sources
from onediff_ext.panel.status_view import StatusView
from onediff_ext.webui import extension
from onediff_ext.webui.infotext_paste import infotext_fields
from onediff_ext.webui.settings import HOST_FEATURES
from onediff_ext.webui.webui_panel_host import WebUIPanelHost
from onediff_ext.webui.xyz import axis_values

logger = logging.getLogger(__name__)
PANEL_HOST = WebUIPanelHost(extension.current)


class OneDiffScript(scripts.Script):
    """Puts graphs under the host's models for the length of each job that has OneDiff on."""

    def title(self) -> str:
        return "OneDiff"

    def show(self, is_img2img: bool) -> Any:  # noqa: ARG002
        return scripts.AlwaysVisible

    def ui(self, is_img2img: bool) -> list[Any]:
        tab, other = ("img2img", "txt2img") if is_img2img else ("txt2img", "img2img")
        sources = tab_sources(tab, other)

        def elem_id(name: str) -> str:
            return f"onediff_{tab}_{name}"

        enabled_by_default = PANEL_HOST.off_reason() is None
        if hasattr(ui_components, "InputAccordion"):
            frame = ui_components.InputAccordion(
                enabled_by_default, label="OneDiff", elem_id=f"onediff_{tab}"
            )
            with frame as enabled:
                with enabled.extra():
                    header = _header(elem_id)
                panel = build_panel(PANEL_HOST, enabled, header, elem_id, sources)
                _refresh(panel, elem_id)
        else:
            with gr.Accordion("OneDiff", open=False, elem_id=f"onediff_{tab}"):
                enabled = gr.Checkbox(
                    enabled_by_default, label="Enable OneDiff", elem_id=elem_id("enabled")
                )
                panel = build_panel(PANEL_HOST, enabled, _header(elem_id), elem_id, sources)
                _refresh(panel, elem_id)
        self.infotext_fields = infotext_fields(panel.controls)
        self.paste_field_names = [
            field.infotext for field in fields_for(HOST_FEATURES) if field.infotext
        ]
        return panel.inputs

    def before_process(self, p: Any, *args: Any) -> None:  # noqa: ARG002
        """The host calls this before it loads the job's checkpoint."""
        extension.current().before_load(p)

    def process(self, p: Any, *args: Any) -> None:
        """Start the job: the host calls this before it encodes or samples."""
        state = extension.current()
        values = {**from_arguments(args), **axis_values(p)}
        for name in INFOTEXT_NAMES & p.extra_generation_params.keys():
            del p.extra_generation_params[name]  # of the cell before: a grid's jobs share them
        try:
            choices, notes = Choices.for_picture(values)
            choices.check_features(HOST_FEATURES)
            reason = state.begin(p, choices, notes)
        except OneDiffError as exc:
            state.refuse(p, str(exc))
            _tell(p, f"This picture is drawn without OneDiff: {exc}")
            if state.stops(on_failure_of(values)):
                _stop(state, p, str(exc))
            return
        for note in notes:
            _tell(p, f"OneDiff: {note}")
        if state.settings.get("onediff_infotext"):
            p.extra_generation_params.update(infotext_entries(state.drawn_choices(choices)))
        if reason and state.stops(choices.on_failure):
            _stop(state, p, reason)

    def process_before_every_sampling(self, p: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        extension.current().graphs.before_sampling(p)

    def post_sample(self, p: Any, ps: Any, *args: Any) -> None:  # noqa: ARG002
        extension.current().graphs.after_sampling(p)

    def postprocess(self, p: Any, processed: Any, *args: Any) -> None:  # noqa: ARG002
        extension.current().end(p)


def changes_of_job(p: Any) -> dict[str, str]:
    """The job's choices that change pictures; empty without any, or when they are unreadable."""
    for script in getattr(getattr(p, "scripts", None), "alwayson_scripts", ()):
        if isinstance(script, OneDiffScript):
            arguments = p.script_args[script.args_from : script.args_to]
            try:
                choices, _ = Choices.for_picture({**from_arguments(arguments), **axis_values(p)})
            except OneDiffError:
                break  # this job is drawn without OneDiff
            return choices.changes()
    return {}


def _stop(state: extension.Extension, p: Any, reason: str) -> None:
    message = f"OneDiff stopped this: {reason.rstrip('.')}."
    _tell(p, message)
    state.add_note(message)  # a client of the API gets no comments
    shared.state.interrupt()


def _tell(p: Any, message: str) -> None:
    """Show a message below the picture, and in the log."""
    logger.warning("%s", message)
    p.comment(message)


def _header(elem_id: Callable[[str], str]) -> Any:
    return gr.HTML(
        StatusView(PANEL_HOST).header(enabled=False),
        elem_id=elem_id("header"),
        elem_classes=["onediff-header-status"],
    )


def _refresh(panel: Panel, elem_id: Callable[[str], str]) -> None:
    gr.HTML(html.style_element())
    # Gradio 3.41 has no timer: javascript/onediff.js clicks this button.
    button = gr.Button("", elem_id=elem_id("refresh"), elem_classes=["onediff-hidden"])
    button.click(
        panel.show_status,
        inputs=[panel.controls["enabled"]],
        outputs=panel.status_outputs,
        queue=False,
        show_progress="hidden",
    )

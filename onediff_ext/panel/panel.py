"""The panel as Gradio components: preset, status, builds, folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypedDict

import gradio as gr

from onediff_ext.panel.build_buttons import build_buttons
from onediff_ext.panel.control_values import VAE, to_control
from onediff_ext.panel.field import (
    CHECKBOX,
    CHECKBOXES,
    COMBO,
    DROPDOWN,
    RADIO,
    TEXT,
    Field,
)
from onediff_ext.panel.fields import BY_NAME, FIELDS, fields_for
from onediff_ext.panel.gradio_versions import on_user_input
from onediff_ext.panel.library_panel import LibraryPanel
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.panel.presets import CUSTOM, preset_values, presets_for
from onediff_ext.panel.report_panel import ReportPanel
from onediff_ext.panel.size_source import SizeSource
from onediff_ext.panel.status_view import StatusView
from onediff_ext.panel.warm_up_panel import WarmUpPanel

ElementId = Callable[[str], str]


# The fold that shows what the preset chose, and the one for rare choices.
_PRESET_FOLD = ("deepcache", "guidance_steps", "precision", "components", "vae")
_ADVANCED_FOLD = ("backend", "captures", "size_box", "batch_range", "on_failure")


@dataclass
class Panel:
    """The components that a host needs to know.

    Args:
        panel_host: The program that draws.
        controls: Name of a field → its component.
        status_outputs: The components that `show_status` fills: header, details, technical
            details, progress bar, and the buttons that apply only at times.
    """

    panel_host: PanelHost
    controls: dict[str, Any]
    status_outputs: list[Any]

    @property
    def inputs(self) -> list[Any]:
        """The controls in the order of `FIELDS`: the arguments of a job.

        Fields that the host does not offer are left out; these are the last ones.
        """
        return [self.controls[field.name] for field in FIELDS if field.name in self.controls]

    def show_status(self, enabled: bool) -> list[Any]:
        """The status as HTML, and which buttons do something, for `status_outputs`.

        Args:
            enabled: Whether OneDiff is ticked.
        """
        build_now, *others = astuple(build_buttons(self.panel_host.status()))
        shown = [gr.update(interactive=build_now), *(gr.update(visible=v) for v in others)]
        return [*StatusView(self.panel_host).show(bool(enabled)), *shown]


def build_panel(
    panel_host: PanelHost,
    enabled: Any,
    header: Any,
    elem_id: ElementId,
    sources: Sequence[SizeSource],
) -> Panel:
    """Make the panel's components, in the Blocks context of the caller.

    Args:
        panel_host: The program that draws.
        enabled: The component that turns OneDiff on, made by the host's page.
        header: The HTML component for the header, in the accordion's header where possible.
        elem_id: Makes an element's id from a name, unique on the page.
        sources: The tabs whose size a click adds to the sizes; the first is the panel's own tab.
    """
    fields = {field.name: field for field in fields_for(panel_host.features())}
    fields["preset"] = replace(BY_NAME["preset"], choices=presets_for(fields.values()))
    names = tuple(name for name in BY_NAME["components"].choices if name != VAE)
    fields["components"] = replace(BY_NAME["components"], choices=names)
    controls = {"enabled": enabled, "preset": make_control(fields["preset"], elem_id)}
    _, shown, technical, _ = StatusView(panel_host).show(enabled=False)
    details = gr.HTML(shown, elem_id=elem_id("details"), elem_classes=["onediff-details"])
    warm_up = WarmUpPanel(panel_host, sources, elem_id)
    controls["sizes"] = warm_up.sizes
    for label, name, fold in (
        ("What the preset chose", "preset_fold", _PRESET_FOLD),
        ("Advanced", "advanced", _ADVANCED_FOLD),
    ):
        with gr.Accordion(label, open=False, elem_id=elem_id(name)):
            controls |= {n: make_control(fields[n], elem_id) for n in fold if n in fields}
    LibraryPanel(panel_host, elem_id)
    texts = ReportPanel(panel_host, technical, elem_id)
    outputs = [header, details, texts.technical, warm_up.progress, *warm_up.buttons]
    panel = Panel(panel_host, controls, outputs)
    texts.connect(panel.inputs)
    warm_up.connect(panel.inputs, panel.status_outputs, panel.show_status)
    enabled.change(
        panel.show_status,
        inputs=[enabled],
        outputs=panel.status_outputs,
        show_progress="hidden",
    )
    _connect_preset(controls)
    return panel


class _Common(TypedDict):
    """The arguments that every component takes."""

    label: str
    info: str
    value: Any
    elem_id: str


def make_control(field: Field, elem_id: ElementId) -> Any:
    """The component of one field."""
    common: _Common = {
        "label": field.label,
        "info": field.help,
        "value": to_control(field, field.default),
        "elem_id": elem_id(field.name),
    }
    if field.form == CHECKBOX:
        return gr.Checkbox(**common)
    if field.form == TEXT:
        return gr.Textbox(placeholder=field.placeholder, max_lines=1, **common)
    if field.form == COMBO:
        return gr.Dropdown(choices=list(field.choices), allow_custom_value=True, **common)
    make = {RADIO: gr.Radio, CHECKBOXES: gr.CheckboxGroup, DROPDOWN: gr.Dropdown}[field.form]
    return make(choices=list(field.choices), **common)


def _connect_preset(controls: dict[str, Any]) -> None:
    """A chosen preset shows its values; a change of one of them selects Custom."""
    decided = [field for field in FIELDS if field.decided_by_preset and field.name in controls]
    preset = controls["preset"]

    def show(name: str) -> list[Any]:
        values = preset_values(name, FIELDS)
        updates = []
        for field in decided:
            value = values.get(field.name)
            shown = gr.update() if value is None else gr.update(value=to_control(field, value))
            updates.append(shown)
        return updates

    outputs = [controls[field.name] for field in decided]
    on_user_input(preset, show, inputs=[preset], outputs=outputs, show_progress="hidden")
    for control in outputs:
        on_user_input(control, lambda: CUSTOM, outputs=[preset], show_progress="hidden")

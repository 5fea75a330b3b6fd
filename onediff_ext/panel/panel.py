"""The panel as Gradio components: choices, warm-up, graph library, status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import gradio as gr

from onediff_ext.panel import html
from onediff_ext.panel.fields import (
    BY_NAME,
    CHECKBOX,
    CHECKBOXES,
    COMBO,
    CUSTOM,
    DROPDOWN,
    FIELDS,
    RADIO,
    TEXT,
    Field,
    fields_for,
    preset_values,
    presets_for,
)
from onediff_ext.panel.gradio_versions import on_user_input
from onediff_ext.panel.library_panel import build_library
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.panel.warm_up_panel import WarmUpButtons

ElementId = Callable[[str], str]


@dataclass
class Panel:
    """The components that a host needs to know.

    Args:
        port: The way to whoever draws.
        controls: Name of a field → its component.
        details: Below the header; what the line has no room for.
        header: Shows the one line.
        warm_up: The buttons beside the list of sizes.
    """

    port: PanelHost
    controls: dict[str, Any]
    details: Any
    header: Any
    warm_up: WarmUpButtons

    @property
    def inputs(self) -> list[Any]:
        """The controls in the order of `FIELDS`: the arguments of a job. What the host cannot do is
        left out, which are the last ones."""
        return [self.controls[field.name] for field in FIELDS if field.name in self.controls]

    @property
    def status_outputs(self) -> list[Any]:
        """What `show_status` fills."""
        return [self.header, self.details]

    def show_status(self, enabled: bool) -> list[str]:
        """The status as HTML, for `status_outputs`.

        Args:
            enabled: Whether OneDiff is ticked.
        """
        status = self.port.status()
        note = _note(self.port, bool(enabled))
        return [html.status_line(status, bool(enabled)), html.status_details(status, note)]


def build_panel(port: PanelHost, enabled: Any, header: Any, elem_id: ElementId) -> Panel:
    """Make the panel's components, in the Blocks context of the caller.

    Args:
        port: The way to whoever draws.
        enabled: The component that turns OneDiff on, made by the host's page.
        header: The HTML component for the one line, in the accordion's header if it can be.
        elem_id: Makes an element's id from a name, unique on the page.
    """
    controls = {"enabled": enabled}
    details = gr.HTML(
        html.status_details(port.status(), _note(port, enabled=False)), elem_id=elem_id("details")
    )
    fields = {field.name: field for field in fields_for(port.features())}
    presets = presets_for(port.features())
    fields["preset"] = replace(BY_NAME["preset"], choices=presets)
    for name in ("preset", "deepcache", "components", "vae"):
        if name in fields:
            controls[name] = make_control(fields[name], elem_id)
    with gr.Group():
        controls["sizes"] = make_control(BY_NAME["sizes"], elem_id)
        warm_up = WarmUpButtons(elem_id)
    with gr.Accordion("Advanced", open=False, elem_id=elem_id("advanced")):
        for field in fields.values():
            if field.advanced:
                controls[field.name] = make_control(field, elem_id)
    build_library(port, elem_id)
    panel = Panel(port, controls, details, header, warm_up)
    warm_up.connect(port, controls["sizes"], panel.inputs, panel.status_outputs, panel.show_status)
    enabled.change(
        panel.show_status,
        inputs=[enabled],
        outputs=panel.status_outputs,
        show_progress="hidden",
    )
    _connect_preset(controls)
    return panel


def _note(port: PanelHost, enabled: bool) -> str | None:
    """What has to be said before anything is drawn: why it is off, or what is missing."""
    return (None if enabled else port.off_reason()) or port.missing_reason()


class _Common(TypedDict):
    """What every kind of component takes."""

    label: str
    info: str
    value: Any
    elem_id: str


def make_control(field: Field, elem_id: ElementId) -> Any:
    """The component of one field."""
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    common: _Common = {
        "label": field.label,
        "info": field.help,
        "value": default,
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
    """A preset shows what it sets; touching one of these makes the preset Custom."""
    decided = [field for field in FIELDS if field.preset and field.name in controls]
    preset = controls["preset"]

    def show(name: str) -> list[Any]:
        values = preset_values(name)
        updates = []
        for field in decided:
            value = values.get(field.name)
            value = list(value) if isinstance(value, tuple) else value
            updates.append(gr.update() if value is None else gr.update(value=value))
        return updates

    outputs = [controls[field.name] for field in decided]
    on_user_input(preset, show, inputs=[preset], outputs=outputs, show_progress="hidden")
    for control in outputs:
        on_user_input(control, lambda: CUSTOM, outputs=[preset], show_progress="hidden")

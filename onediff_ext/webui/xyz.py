"""X/Y/Z axes: enabled, preset, backend, VAE, DeepCache, precision, guidance steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onediff_ext.panel.choices import Choices
from onediff_ext.panel.field_values import checked
from onediff_ext.panel.fields import BY_NAME, fields_for
from onediff_ext.panel.presets import CUSTOM, presets_for
from onediff_ext.webui.settings import HOST_FEATURES

AXIS_ATTRIBUTE = "onediff_axis_values"
"""Attribute of the host's ``p``: field → value that overrides the panel. Copies keep it."""

_NAMES = {
    "enabled": "Enabled",
    "preset": "Preset",
    "backend": "Backend",
    "vae": "VAE",
    "deepcache": "DeepCache",
    "precision": "Precision",
    "guidance_steps": "Guidance steps",
}
AXES = tuple(_NAMES)
_LABELS = {name: f"[OneDiff] {label}" for name, label in _NAMES.items()}


def axis_values(p: Any) -> dict[str, Any]:
    """The values that the axes set for a job; empty without axes."""
    return dict(getattr(p, AXIS_ATTRIBUTE, None) or {})


def add_axes(xyz_grid: Any) -> None:
    """Add the axes to the host's X/Y/Z script, once.

    Args:
        xyz_grid: The module of the script.
    """
    known = {option.label for option in xyz_grid.axis_options}
    for name in AXES:
        if _LABELS[name] not in known:
            xyz_grid.axis_options.append(_axis(xyz_grid, name))


def remove_axes(xyz_grid: Any) -> None:
    """Remove the axes from the host's X/Y/Z script."""
    ours = set(_LABELS.values())
    xyz_grid.axis_options[:] = [o for o in xyz_grid.axis_options if o.label not in ours]


def find_xyz_grid() -> Any:
    """The module of the host's X/Y/Z script, or None."""
    from modules import scripts

    for entry in scripts.scripts_data:
        if entry.script_class.__module__ in ("xyz_grid.py", "scripts.xyz_grid", "xyz_grid"):
            return entry.module
    return None


def _axis(xyz_grid: Any, name: str) -> Any:
    choices = BY_NAME[name].choices
    if name == "enabled":
        choices = ("False", "True")
    elif name == "preset":
        choices = presets_for(fields_for(HOST_FEATURES))
    return xyz_grid.AxisOption(
        _LABELS[name], str, _apply(name), confirm=_confirm(name), choices=lambda: list(choices)
    )


def _confirm(name: str) -> Callable[[Any, Sequence[Any]], None]:
    """Makes the check that the host runs before it draws the first picture."""

    def confirm(_: Any, values: Sequence[Any]) -> None:
        for value in values:
            Choices.parse({name: checked(BY_NAME[name], value)}).check_features(HOST_FEATURES)

    return confirm


def _apply(name: str) -> Callable[[Any, Any, Any], None]:
    def apply(p: Any, value: Any, _: Any) -> None:
        values = axis_values(p)
        values[name] = value
        if BY_NAME[name].decided_by_preset:
            # Any other preset would override this value.
            values["preset"] = CUSTOM
        # An axis would change nothing while OneDiff is off.
        values.setdefault("enabled", True)
        setattr(p, AXIS_ATTRIBUTE, values)

    return apply

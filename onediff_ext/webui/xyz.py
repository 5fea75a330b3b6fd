"""X/Y/Z axes: enabled, preset, backend, VAE, DeepCache, precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onediff_ext.panel.fields import BY_NAME, CUSTOM, presets_for
from onediff_ext.webui.settings import HOST_FEATURES

AXIS_ATTRIBUTE = "onediff_axis_values"
"""On the host's ``p``: field → value, in place of the panel's. Copies of ``p`` carry it along."""

AXES = ("enabled", "preset", "backend", "vae", "deepcache", "precision")
_LABELS = {
    name: f"[OneDiff] {label}"
    for name, label in zip(
        AXES, ("Enabled", "Preset", "Backend", "VAE", "DeepCache", "Precision"), strict=True
    )
}


def axis_values(p: Any) -> dict[str, Any]:
    """What the axes say for a job; empty when there are none."""
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
    """Take the axes out of the host's X/Y/Z script."""
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
        choices = presets_for(HOST_FEATURES)
    return xyz_grid.AxisOption(_LABELS[name], str, _apply(name), choices=lambda: list(choices))


def _apply(name: str) -> Callable[[Any, Any, Any], None]:
    def apply(p: Any, value: Any, _: Any) -> None:
        values = axis_values(p)
        values[name] = value
        if BY_NAME[name].preset:
            # A preset would decide these itself.
            values["preset"] = CUSTOM
        setattr(p, AXIS_ATTRIBUTE, values)

    return apply

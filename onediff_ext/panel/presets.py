"""The presets of the panel, and the value that each preset gives to each field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onediff_ext.panel.field import Field

CUSTOM = "Custom"
PRESETS: dict[str, dict[str, object]] = {
    "Balanced": {},
    "Fast": {"deepcache": "light"},
    "Maximum": {"deepcache": "medium"},
    CUSTOM: {},
}
"""Preset → the values that differ from the fields' defaults. Custom leaves all to the user."""


def preset_values(preset: str, fields: Iterable[Field]) -> dict[str, Any]:
    """The value of each field that a preset decides; empty for Custom.

    Args:
        preset: A key of `PRESETS`.
        fields: The table of fields.
    """
    if preset == CUSTOM:
        return {}
    differing = PRESETS[preset]
    return {f.name: differing.get(f.name, f.default) for f in fields if f.decided_by_preset}


def presets_for(fields: Iterable[Field]) -> tuple[str, ...]:
    """The presets that need none but these fields.

    Args:
        fields: The fields that a host offers.
    """
    offered = {field.name for field in fields}
    return tuple(name for name, values in PRESETS.items() if offered.issuperset(values))

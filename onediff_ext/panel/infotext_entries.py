"""The panel's choices as entries of a picture's infotext, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.field import Field
from onediff_ext.panel.field_values import checked
from onediff_ext.panel.fields import FIELDS
from onediff_ext.panel.presets import CUSTOM, PRESETS, preset_values

NAMES = frozenset({"OneDiff", "OneDiff preset", *(f.infotext for f in FIELDS if f.infotext)})
"""The names of all entries that `infotext_entries` may write."""


def infotext_entries(choices: Choices) -> dict[str, str]:
    """The entries for a picture drawn with these choices, such as ``{"OneDiff": "on"}``.

    Values at their default, and values that the preset decides, are left out.
    """
    if not choices.enabled:
        return {}
    entries = {"OneDiff": "on", "OneDiff preset": choices.preset}
    decided = preset_values(choices.preset, FIELDS)
    for field in FIELDS:
        value = getattr(choices, field.name)
        if field.infotext in ("", *entries) or field.name in decided:
            continue
        if value != field.default:
            entries[field.infotext] = "+".join(value) if isinstance(value, tuple) else str(value)
    return entries


def value_from_infotext(field: Field, entries: Mapping[str, Any]) -> Any:
    """A field's value as an infotext has it; None for a picture drawn without OneDiff.

    A value that this version does not know becomes the field's default.
    """
    if "OneDiff" not in entries:
        return None
    if field.name == "enabled":
        return checked(field, entries["OneDiff"])
    text = entries.get(field.infotext)
    if text is None:
        preset = entries.get("OneDiff preset")
        decided = preset_values(preset if preset in PRESETS else CUSTOM, FIELDS)
        value = decided.get(field.name, field.default)
    else:
        try:
            value = checked(field, text)
        except OptionError:
            value = field.default
    return list(value) if isinstance(value, tuple) else value

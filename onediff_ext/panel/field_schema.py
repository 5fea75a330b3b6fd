"""The fields and presets as plain values: the schema from which REST clients make forms."""

from __future__ import annotations

from onediff_ext.panel.fields import fields_for
from onediff_ext.panel.presets import preset_values, presets_for

SCHEMA_NUMBER = 1


def schema(features: frozenset[str] = frozenset()) -> dict[str, object]:
    """Every field with its form, default and choices, and what each preset sets.

    Args:
        features: The features of the host.
    """
    fields = fields_for(features)
    presets = presets_for(fields)
    return {
        "schema": SCHEMA_NUMBER,
        "fields": [
            {
                "name": field.name,
                "form": field.form,
                "label": field.label,
                "help": field.help,
                "default": _plain(field.default),
                "choices": list(presets if field.name == "preset" else field.choices),
                "infotext": field.infotext,
                "decided_by_preset": field.decided_by_preset,
            }
            for field in fields
        ],
        "presets": {
            preset: {name: _plain(value) for name, value in preset_values(preset, fields).items()}
            for preset in presets
        },
    }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value

"""The fields as plain values: for the REST route, so that a client can make its own form."""

from __future__ import annotations

from onediff_ext.panel.fields import fields_for, preset_values, presets_for

SCHEMA_NUMBER = 1


def schema(features: frozenset[str] = frozenset()) -> dict[str, object]:
    """Every field with its form, default and choices, and what each preset sets.

    Args:
        features: Of the host.
    """
    fields, presets = fields_for(features), presets_for(features)
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
                "decided_by_preset": field.preset,
            }
            for field in fields
        ],
        "presets": {
            name: {
                field.name: _plain(preset_values(name)[field.name])
                for field in fields
                if field.name in preset_values(name)
            }
            for name in presets
        },
    }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value

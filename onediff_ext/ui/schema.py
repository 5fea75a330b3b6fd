"""The fields as plain values: for the REST route, so that a client can make its own form."""

from __future__ import annotations

from onediff_ext.ui.fields import FIELDS, PRESETS, preset_values

SCHEMA_NUMBER = 1


def schema() -> dict[str, object]:
    """Every field with its form, default and choices, and what each preset sets."""
    return {
        "schema": SCHEMA_NUMBER,
        "fields": [
            {
                "name": field.name,
                "form": field.form,
                "label": field.label,
                "help": field.help,
                "default": _plain(field.default),
                "choices": list(field.choices),
                "infotext": field.infotext,
                "decided_by_preset": field.preset,
            }
            for field in FIELDS
        ],
        "presets": {
            name: {key: _plain(value) for key, value in preset_values(name).items()}
            for name in PRESETS
        },
    }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value

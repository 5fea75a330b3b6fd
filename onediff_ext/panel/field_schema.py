"""The fields as JSON Schema, and as the table from which REST clients make forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onediff_ext.core.json_schema import DIALECT
from onediff_ext.core.shapes import MAX_SIZES_CHARS, parse_sizes
from onediff_ext.panel.field import CHECKBOX, CHECKBOXES, COMBO, NUMBER, Field
from onediff_ext.panel.fields import fields_for
from onediff_ext.panel.gpu_choices import chosen_gpu_count
from onediff_ext.panel.presets import preset_values, presets_for
from onediff_ext.panel.size_limits import parse_batch_range, parse_size_box
from onediff_ext.pictures.naming import NameTemplate
from onediff_ext.pictures.size_rules import parse_size_rule

SCHEMA_NUMBER = 2  # 2: JSON Schemas under "$defs"

FORMATS: Mapping[str, Callable[[str], object]] = {
    "sizes": parse_sizes,
    "size-box": parse_size_box,
    "batch-range": parse_batch_range,
    "size-rule": parse_size_rule,
    "gpus": chosen_gpu_count,
    "name-template": NameTemplate,
}
"""Name of a format → a function that raises OptionError for a text of another form."""


def field_schema(field: Field) -> dict[str, Any]:
    """The JSON Schema of a field's values."""
    described = {"title": field.label, "description": field.help, "default": _plain(field.default)}
    return {**_value_schema(field), **described}


def object_schema(fields: Iterable[Field]) -> dict[str, Any]:
    """The JSON Schema of an object with one entry for each field; no entry is required."""
    return {
        "type": "object",
        "properties": {field.name: field_schema(field) for field in fields},
        "additionalProperties": False,
    }


def schema(features: frozenset[str] = frozenset()) -> dict[str, object]:
    """Every field with its form, default and choices, and what each preset sets.

    Args:
        features: The features of the host.

    Returns:
        Plain values. ``$defs`` has the JSON Schemas of the bodies that the REST routes accept.
    """
    fields = fields_for(features)
    presets = presets_for(fields)
    return {
        "$schema": DIALECT,
        "schema": SCHEMA_NUMBER,
        "$defs": {"choices": object_schema(fields), "empty": object_schema(())},
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


def _value_schema(field: Field) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string", "maxLength": MAX_SIZES_CHARS}
    if field.format:
        text["format"] = field.format
    if field.form == CHECKBOX:
        return {"type": "boolean"}
    if field.form == NUMBER:
        low, high = field.span or (None, None)
        return {"type": "integer", "minimum": low, "maximum": high}
    if field.form == CHECKBOXES:
        return {"type": "array", "items": {"type": "string", "enum": list(field.choices)}}
    if field.form == COMBO:
        return {"anyOf": [{**text, "examples": list(field.choices)}, *field.accepts]}
    if field.choices:
        return {"type": "string", "enum": list(field.choices)}
    if field.format == "sizes":
        return {"anyOf": [text, {"type": "array", "items": {"type": "string"}}]}
    return text


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value

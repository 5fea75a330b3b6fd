"""A field's value as its control on the page has it, and back.

Two controls differ from their fields. The sizes are a list of chips. The VAE has a control of its
own, so the components do not name it.
"""

from __future__ import annotations

from typing import Any

from onediff_ext.core.shapes import SIZE_SEPARATORS
from onediff_ext.panel.field import Field

VAE = "VAE"
"""The component that has a control of its own."""


def to_control(field: Field, value: Any) -> Any:
    """Return a field's value as its control takes it.

    Args:
        field: The field.
        value: A value of the field.
    """
    if field.name == "sizes":
        return [size for size in SIZE_SEPARATORS.split(value) if size]
    if isinstance(value, (tuple, list)):
        return [entry for entry in value if field.name != "components" or entry != VAE]
    return value


def from_control(field: Field, value: Any) -> Any:
    """Return the value of a field's control as the field takes it.

    Args:
        field: The field.
        value: From the page; clients of the API may send a text.
    """
    if isinstance(value, (tuple, list)):
        if field.name == "sizes" and all(isinstance(size, str) for size in value):
            return ", ".join(value)
        if field.name == "components" and VAE not in value:
            return [*value, VAE]
    return value

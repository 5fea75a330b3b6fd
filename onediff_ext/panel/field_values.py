"""Checks of one field's value, wherever it comes from: panel, API, infotext or X/Y/Z."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.core.shapes import MAX_SIZES_CHARS
from onediff_ext.panel.field import CHECKBOX, CHECKBOXES, Field

_SHOWN_CHARS = 60
_SHOWN_MESSAGE_CHARS = 300


def checked(field: Field, value: Any) -> Any:
    """Return a value in the field's own form.

    Args:
        field: The field.
        value: Anything; the API passes on whatever a client sends.

    Raises:
        OptionError: The value cannot be used; the message names it and the hint says what can.
    """
    if isinstance(value, str) and len(value) > MAX_SIZES_CHARS:
        raise OptionError(
            f"{field.label}: a text of {len(value):,} characters is too long.",
            f"Use {MAX_SIZES_CHARS:,} at most.",
        )
    if is_nested(value):  # such a value may be too deep to be shown
        raise OptionError(f"{field.label}: the value is nested.", "Use a text or a number.")
    if field.form == CHECKBOX:
        if isinstance(value, str):
            return value.strip().lower() in ("1", "true", "on", "yes")
        if not isinstance(value, (bool, int, float)):
            raise _unusable(field, value, "Use true or false.")
        return bool(value)
    if field.form == CHECKBOXES:
        if not isinstance(value, (str, list, tuple, set, frozenset)):
            raise _unusable(field, value, f"Use a list of: {', '.join(field.choices)}.")
        names = re.split(r"[+,]", value) if isinstance(value, str) else list(value)
        wanted = {_one_of(field, name) for name in names if str(name).strip()}
        return tuple(choice for choice in field.choices if choice in wanted)
    if field.normalize is not None:
        try:
            return field.normalize(value)
        except OptionError as exc:
            raise OptionError(shortened(exc.message, _SHOWN_MESSAGE_CHARS), exc.hint) from exc
    if field.choices:
        return _one_of(field, value)
    if not isinstance(value, (str, int, float)):
        raise _unusable(field, value, "Use a text.")
    return str(value)


def is_nested(value: object) -> bool:
    """Whether a value from JSON holds values that hold others: no field has one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(
        isinstance(part, (Mapping, list, tuple)) for part in value
    )


def shortened(text: str, max_chars: int = _SHOWN_CHARS) -> str:
    """A text for a message, cut when it is longer than `max_chars`."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def _one_of(field: Field, value: object) -> str:
    wanted = value.strip().casefold() if isinstance(value, str) else str(value)[:_SHOWN_CHARS]
    for choice in field.choices:
        if choice.casefold() == wanted:
            return choice
    raise _unusable(field, value, f"Use one of: {', '.join(field.choices)}.")


def _unusable(field: Field, value: object, hint: str) -> OptionError:
    return OptionError(f"{field.label}: {shortened(repr(value))} is unknown.", hint)

"""Checks of one field's value, wherever it comes from: panel, API, infotext or X/Y/Z."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.core.json_schema import check
from onediff_ext.core.shapes import MAX_SIZES_CHARS
from onediff_ext.panel.field import CHECKBOX, CHECKBOXES, NUMBER, TEXT, Field
from onediff_ext.panel.field_schema import FORMATS, field_schema

_SHOWN_CHARS = 60
_SHOWN_MESSAGE_CHARS = 300
_TRUE, _FALSE = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def checked(field: Field, value: Any) -> Any:
    """Return a value in the field's own form.

    The field's JSON Schema decides. Texts that stand for values ("on", "unet+VAE") are understood
    before, because infotext and X/Y/Z have nothing else.

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
    value = _understood(field, value)
    try:
        check(value, field_schema(field), field.label, FORMATS)
        if field.normalize is not None:
            return field.normalize(value)
    except OptionError as exc:
        raise OptionError(shortened(exc.message, _SHOWN_MESSAGE_CHARS), exc.hint) from exc
    if field.form == CHECKBOXES:
        return tuple(choice for choice in field.choices if choice in value)
    return int(value) if field.form == NUMBER else value


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


def _understood(field: Field, value: Any) -> Any:
    """The value that a text, or another form of a value, stands for; the same where none is."""
    if field.form == CHECKBOX:
        word = value.strip().lower() if isinstance(value, str) else str(value)
        return True if word in _TRUE else False if word in _FALSE else value
    if field.form == NUMBER and isinstance(value, str):
        return int(value) if re.fullmatch(r"\s*[0-9]{1,9}\s*", value) else value
    if field.form == CHECKBOXES and isinstance(value, (str, set, frozenset, list, tuple)):
        names = re.split(r"[+,]", value) if isinstance(value, str) else value
        return [_choice(field, name) for name in names if str(name).strip()]
    if field.form == TEXT:
        if field.format == "sizes" and isinstance(value, (list, tuple)):
            return _understood(field, ", ".join(map(str, value)))
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return str(value) if is_number else value
    if field.choices and field.normalize is None:
        return _choice(field, value)
    return value


def _choice(field: Field, value: object) -> object:
    wanted = value.strip().casefold() if isinstance(value, str) else None
    return next((choice for choice in field.choices if choice.casefold() == wanted), value)

"""Checks plain values against a JSON Schema: the subset that this package's own schemas use.

The keywords are type, enum, anyOf, properties, additionalProperties, items, maxItems, minimum,
maximum, maxLength and format. Others are annotations. WebUIs ship either version of pydantic, so
requests are checked without it.

Source: https://json-schema.org/draft/2020-12/schema.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from onediff_ext.core.errors import OptionError

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = Mapping[str, Any]
FormatChecks = Mapping[str, Callable[[str], object]]
"""Name of a format → a function that raises OptionError for a text of another form."""

_SHOWN_CHARS = 60
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (Mapping,),
    "array": (list, tuple),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
_NAMED: Mapping[str, str] = {
    "object": "an object",
    "array": "a list",
    "string": "a text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "null": "null",
}


def check(value: object, schema: Schema, what: str, formats: FormatChecks | None = None) -> None:
    """Check a value.

    Args:
        value: From JSON, or plain values like it; a tuple counts as an array.
        schema: What it has to be.
        what: Names the value in messages.
        formats: The checks of the schema's formats; texts of other formats are not checked.

    Raises:
        OptionError: It is something else. The message says what, and the hint what to use.
    """
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], what, formats)
    wanted = schema.get("type")
    if wanted is not None and not _has_type(value, wanted):
        raise _unusable(what, value, f"Use {_NAMED[wanted]}.")
    if "enum" in schema and value not in schema["enum"]:
        raise _unusable(what, value, _choices_hint(value, schema["enum"]))
    if isinstance(value, str):
        _check_text(value, schema, what, formats or {})
    elif isinstance(value, Mapping):
        _check_object(value, schema, what, formats)
    elif isinstance(value, (list, tuple)):
        if len(value) > schema.get("maxItems", len(value)):
            raise OptionError(
                f"{what}: {len(value)} are too many.", f"Use at most {schema['maxItems']}."
            )
        for item in value:
            check(item, schema.get("items", {}), what, formats)
    elif isinstance(value, (int, float)):
        _check_number(value, schema, what)


def check_names(names: Collection[object], known: Collection[str], what: str = "entry") -> None:
    """Check the names of an object's entries.

    Args:
        names: The given names.
        known: The names that are allowed.
        what: What is named, in the singular.

    Raises:
        OptionError: A name is unknown; the hint has the nearest known one.
    """
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise OptionError(f"Unknown {what} {shown(unknown)}.", _names_hint(unknown, known))


def shown(value: object) -> str:
    """A value for a message, cut when it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _check_any(
    value: object, schemas: Collection[Schema], what: str, formats: FormatChecks | None
) -> None:
    errors = []
    for schema in schemas:
        try:
            check(value, schema, what, formats)
        except OptionError as exc:
            # The nearest alternative is the one with the value's own type.
            errors.append((not _has_type(value, schema.get("type")), exc))
        else:
            return
    raise min(errors, key=lambda error: error[0])[1]


def _has_type(value: object, name: str | None) -> bool:
    if name is None:
        return True
    if isinstance(value, bool):  # a bool is an int in Python, and no number in JSON
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _check_number(value: float, schema: Schema, what: str) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    # Written so that NaN is refused too.
    if (low is None or value >= low) and (high is None or value <= high):
        return
    limits = f"{low} or more" if high is None else f"{high} or less" if low is None else None
    raise _unusable(what, value, f"Use {limits or f'{low} to {high}'}.")


def _check_text(value: str, schema: Schema, what: str, formats: FormatChecks) -> None:
    longest = schema.get("maxLength", len(value))
    if len(value) > longest:
        raise OptionError(
            f"{what}: a text of {len(value):,} characters is too long.",
            f"Use {longest:,} at most.",
        )
    checks = formats.get(schema.get("format", ""))
    if checks is not None:
        checks(value)


def _check_object(
    value: Mapping[Any, Any], schema: Schema, what: str, formats: FormatChecks | None
) -> None:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    if schema.get("additionalProperties") is False:
        check_names(value, properties, f"entry of {what}")
    for name, entry in value.items():
        check(entry, properties.get(name, {}), f"{what}, {name}", formats)


def _choices_hint(value: object, choices: Collection[object]) -> str:
    hint = f"Use one of: {', '.join(map(str, choices))}."
    nearest = _nearest(value, [str(choice) for choice in choices])
    return hint if nearest is None else f'Did you mean "{nearest}"? {hint}'


def _names_hint(name: object, known: Collection[str]) -> str:
    if not known:
        return "Leave it out."
    hint = f"Known: {', '.join(known)}."
    nearest = _nearest(name, known)
    return hint if nearest is None else f'Did you mean "{nearest}"? {hint}'


def _nearest(text: object, known: Collection[str]) -> str | None:
    if not isinstance(text, str) or len(text) > _SHOWN_CHARS:
        return None
    by_folded = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(text.casefold(), by_folded, 1)
    return by_folded[found[0]] if found else None


def _unusable(what: str, value: object, hint: str) -> OptionError:
    return OptionError(f"{what}: {shown(value)} is unknown.", hint)

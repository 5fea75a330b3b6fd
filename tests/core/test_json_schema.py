"""The checker of plain values against JSON Schemas."""

from __future__ import annotations

from typing import Any

import pytest

from onediff_ext.core.errors import OptionError
from onediff_ext.core.json_schema import check, check_names

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0}, "name": {"type": "string"}},
    "additionalProperties": False,
}


def is_even(text: str) -> None:
    if len(text) % 2:
        raise OptionError("odd")


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (3, {"type": "integer"}),
        (3.0, {"type": "integer"}),
        (0.5, {"type": "number", "minimum": 0, "maximum": 1}),
        (True, {"type": "boolean"}),
        (None, {"type": "null"}),
        ("abc", {"type": "string", "maxLength": 3}),
        ("ab", {"type": "string", "format": "even"}),
        ("abc", {"type": "string", "format": "unheard"}),
        (("a",), {"type": "array", "items": {"enum": ["a"]}, "maxItems": 1}),
        ({"age": 3}, PERSON),
        ("x", {"anyOf": [{"type": "number"}, {"type": "string"}]}),
        (object(), {}),
    ],
)
def test_what_fits_passes(value: object, schema: dict[str, Any]) -> None:
    check(value, schema, "It", {"even": is_even})


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        (3.5, {"type": "integer"}, "It: 3.5 is unknown. Use a whole number."),
        (True, {"type": "integer"}, "It: True is unknown. Use a whole number."),
        (1, {"type": "boolean"}, "It: 1 is unknown. Use true or false."),
        (2, {"type": "number", "minimum": 0, "maximum": 1}, "It: 2 is unknown. Use 0 to 1."),
        (float("nan"), {"type": "number", "minimum": 0}, "It: nan is unknown. Use 0 or more."),
        ("abcd", {"maxLength": 3}, "It: a text of 4 characters is too long. Use 3 at most."),
        ("abc", {"format": "even"}, "odd"),
        (["a", "b"], {"items": {"enum": ["a"]}}, "It: 'b' is unknown. Use one of: a."),
        (["a", "a"], {"maxItems": 1}, "It: 2 are too many. Use at most 1."),
        ({"age": -1}, PERSON, "It, age: -1 is unknown. Use 0 or more."),
        (
            {"nam": ""},
            PERSON,
            "Unknown entry of It 'nam'. Did you mean",
        ),
        ({"age": "x"}, {"anyOf": [{"type": "number"}, PERSON]}, "It, age: 'x' is unknown."),
    ],
)
def test_what_does_not_fit_is_refused(value: object, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as refused:
        check(value, schema, "It", {"even": is_even})
    assert str(refused.value).startswith(said)


def test_a_name_is_compared_without_its_case() -> None:
    with pytest.raises(OptionError, match='Did you mean "UNet"'):
        check_names(["unett"], ["UNet", "VAE"])
    with pytest.raises(OptionError, match="Leave it out"):
        check_names(["anything"], [])
    with pytest.raises(OptionError, match="Known: UNet"):
        check_names([3], ["UNet"])

"""One choice of the panel: its name, form, texts, default and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CHECKBOX, RADIO, CHECKBOXES, DROPDOWN, TEXT = "checkbox", "radio", "checkboxes", "dropdown", "text"
NUMBER = "number"
COMBO = "combobox"
"""A dropdown that also accepts typed text."""


@dataclass(frozen=True)
class Field:
    """One choice.

    Args:
        name: Key in the API's dict and attribute of `Choices`.
        form: How the panel shows it: one of the constants above.
        label: Shown to the user; localisation files translate it.
        help: What it means, in one sentence.
        default: Its value when the user chose none.
        choices: The accepted values; empty for free text.
        infotext: Name of its infotext entry; ``""`` when it has none.
        decided_by_preset: Whether a preset other than Custom decides it.
        placeholder: Example of a text.
        normalize: Turns any accepted value into its text, for a combobox.
        feature: The entry of `FEATURES` that a host needs to offer it; ``""`` for none.
        format: The format of a text, a key of `field_schema.FORMATS`; ``""`` for any text.
        accepts: JSON Schemas of the other values that `normalize` accepts.
        span: Smallest and largest value of a whole number.
        is_for_pictures: Whether a picture depends on it. A picture is drawn with graphs even if
            the value of another field cannot be used.
    """

    name: str
    form: str
    label: str
    help: str
    default: Any
    choices: tuple[str, ...] = ()
    infotext: str = ""
    decided_by_preset: bool = False
    placeholder: str = ""
    normalize: Callable[[object], str] | None = None
    feature: str = ""
    format: str = ""
    accepts: tuple[Mapping[str, Any], ...] = ()
    span: tuple[int, int] | None = None
    is_for_pictures: bool = True

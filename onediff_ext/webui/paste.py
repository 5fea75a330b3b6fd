"""Infotext that comes back: from a picture's text to the panel's components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onediff_ext.panel.choices import from_infotext
from onediff_ext.panel.fields import BY_NAME, Field

Reader = Callable[[Mapping[str, Any]], Any]


def infotext_fields(controls: Mapping[str, Any]) -> list[tuple[Any, Reader]]:
    """(component, reader) for the host's ``infotext_fields``.

    A reader returns None, which leaves the component alone, for a picture without OneDiff.
    """
    return [
        (component, _reader(BY_NAME[name]))
        for name, component in controls.items()
        if BY_NAME[name].infotext
    ]


def _reader(field: Field) -> Reader:
    def read(entries: Mapping[str, Any]) -> Any:
        return from_infotext(field, entries)

    return read

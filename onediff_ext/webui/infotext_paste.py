"""Pasting an infotext: each component of the panel reads its own entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onediff_ext.panel.control_values import VAE, to_control
from onediff_ext.panel.field import Field
from onediff_ext.panel.fields import BY_NAME, VAE_CHOICES
from onediff_ext.panel.infotext_entries import value_from_infotext

Reader = Callable[[Mapping[str, Any]], Any]


def infotext_fields(controls: Mapping[str, Any]) -> list[tuple[Any, Reader]]:
    """(component, reader) for the host's ``infotext_fields``.

    For a picture without OneDiff a reader returns None, which leaves the component unchanged.
    """
    return [
        (component, _reader(BY_NAME[name]))
        for name, component in controls.items()
        if BY_NAME[name].infotext
    ]


def _reader(field: Field) -> Reader:
    def read(entries: Mapping[str, Any]) -> Any:
        value = value_from_infotext(field, entries)
        components = value_from_infotext(BY_NAME["components"], entries)
        # The API may leave the VAE out as a component; the panel has one control for the VAE.
        if field.name == "vae" and components is not None and VAE not in components:
            return VAE_CHOICES[-1]
        return to_control(field, value)

    return read

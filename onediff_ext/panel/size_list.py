"""The panel's list of warm-up sizes, as the user typed it."""

from __future__ import annotations

from collections.abc import Iterable

from onediff_ext.core.shapes import BatchShape, format_sizes, parse_sizes


def with_sizes_added(text: str, more: Iterable[BatchShape]) -> str:
    """Add sizes to a list; each size appears once.

    Raises:
        ShapeError: The text has an entry that is not a size.
    """
    return format_sizes(dict.fromkeys([*parse_sizes(text), *more]))

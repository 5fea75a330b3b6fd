"""Sizes for a warm-up: added to the list as a person typed it, and proposed from pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from onediff_ext.core.shapes import BatchShape, format_sizes, parse_sizes
from onediff_ext.pictures.sizes_used import sizes_used


def recent_sizes(folders: Sequence[Path]) -> list[BatchShape]:
    """The sizes of the latest pictures, most frequent first; a missing folder is passed over."""
    return sizes_used([folder for folder in folders if folder.is_dir()])


def merge_sizes(text: str, more: Iterable[BatchShape]) -> str:
    """Add sizes to a list, each once.

    Raises:
        ShapeError: The text has an entry that is no size.
    """
    return format_sizes(dict.fromkeys([*parse_sizes(text), *more]))

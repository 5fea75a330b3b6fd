"""Sizes worth warming up, from the pictures that were drawn last."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from onediff_ext.core.errors import PictureError
from onediff_ext.core.shapes import CELL_PX, MAX_SIDE_PX, MIN_SIDE_PX, BatchShape

_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
_MAX_DEPTH = 3  # output folder / date / subfolder


def recent_sizes(
    folders: Sequence[Path], *, pictures: int = 100, sizes: int = 6
) -> list[BatchShape]:
    """Count the sizes of the newest pictures.

    Args:
        folders: Output folders; one that does not exist is passed over.
        pictures: How many of the newest count.
        sizes: How many sizes are returned at most.

    Returns:
        The most frequent sizes first, of equal ones the larger; only sizes that can be
        generated, so grids and cut results do not count.
    """
    newest = heapq.nlargest(pictures, _files(folders))
    counts = Counter(shape for _, path in newest if (shape := _shape(Path(path))) is not None)
    ordered = sorted(counts, key=lambda s: (-counts[s], -s.width_px * s.height_px, s))
    return ordered[:sizes]


def merge_sizes(text: str, more: Iterable[BatchShape]) -> str:
    """Add sizes to a list as a person typed it, each once.

    Raises:
        ShapeError: The text has an entry that is no size.
    """
    from onediff_ext.core.shapes import format_sizes, parse_sizes

    return format_sizes(dict.fromkeys([*parse_sizes(text), *more]))


def _files(folders: Sequence[Path]) -> Iterator[tuple[float, str]]:
    for folder in folders:
        yield from _files_of(str(folder), _MAX_DEPTH)


def _files_of(folder: str, depth: int) -> Iterator[tuple[float, str]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if depth > 1 and not entry.name.startswith("."):
                    yield from _files_of(entry.path, depth - 1)
            elif os.path.splitext(entry.name)[1].lower() in _SUFFIXES:
                yield entry.stat().st_mtime, entry.path
        except OSError:
            continue


def _shape(path: Path) -> BatchShape | None:
    from onediff_ext.pictures.facts import read_facts

    try:
        facts = read_facts(path)
    except (PictureError, OSError):
        return None
    sides = (facts.width_px, facts.height_px)
    if all(MIN_SIDE_PX <= side <= MAX_SIDE_PX and side % CELL_PX == 0 for side in sides):
        return BatchShape(*sides)
    return None

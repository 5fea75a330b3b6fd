"""The sizes that somebody draws at, from the pictures in his output folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from onediff_ext.core.errors import PictureError
from onediff_ext.core.shapes import BatchShape, nearest_side_px
from onediff_ext.pictures.finding import find_pictures
from onediff_ext.pictures.picture_header import read_facts
from onediff_ext.pictures.skipped import Report

LATEST = 400
"""How many pictures are looked at, the latest ones."""


def sizes_used(folders: Sequence[Path], limit: int = 8) -> list[BatchShape]:
    """Propose sizes for a warm-up: those of the latest pictures, most frequent first.

    Args:
        folders: Searched with their subfolders; pictures that cannot be read are passed over.
        limit: Most sizes to return.

    Raises:
        PictureError: A folder does not exist.
    """
    found = find_pictures(list(folders), report=Report(), recursive=True)
    dated = [(date, picture.path) for picture in found if (date := _changed_ns(picture.path))]
    counts: Counter[BatchShape] = Counter()
    for _, path in sorted(dated, key=lambda pair: -pair[0])[:LATEST]:
        try:
            facts = read_facts(path)
        except PictureError:
            continue
        counts[BatchShape(nearest_side_px(facts.width_px), nearest_side_px(facts.height_px))] += 1
    return [shape for shape, _ in counts.most_common(limit)]


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # just deleted

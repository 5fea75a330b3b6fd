"""The sizes a user draws at, from the images in the output folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from onediff_ext.core.errors import PictureError
from onediff_ext.core.shapes import BatchShape, nearest_shape
from onediff_ext.pictures.finding import find_pictures
from onediff_ext.pictures.picture_header import read_header
from onediff_ext.pictures.skipped import SkipReport

LATEST_COUNT = 400
"""How many of the latest images are looked at."""


def sizes_used(folders: Sequence[Path], limit: int = 8) -> list[BatchShape]:
    """Propose sizes for a warm-up: those of the latest images, most frequent first.

    Args:
        folders: Searched with their subfolders; unreadable images are ignored.
        limit: Most sizes to return.

    Raises:
        PictureError: A folder does not exist.
    """
    found = find_pictures(list(folders), report=SkipReport(), recursive=True)
    dated = [(date, picture.path) for picture in found if (date := _changed_ns(picture.path))]
    counts: Counter[BatchShape] = Counter()
    for _, path in sorted(dated, key=lambda pair: -pair[0])[:LATEST_COUNT]:
        try:
            header = read_header(path)
        except PictureError:
            continue
        counts[nearest_shape(header.width_px, header.height_px)] += 1
    return [shape for shape, _ in counts.most_common(limit)]


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # just deleted

"""The limits for graphs: a size box ("256x256 - 2048x2048") and a batch range ("1 - 4")."""

from __future__ import annotations

import re

from onediff_ext.core.errors import OptionError
from onediff_ext.core.json_schema import shown
from onediff_ext.core.shapes import parse_width_height

_RANGE = re.compile(r"(.*?)(?:-|–|to)(.*)", re.IGNORECASE | re.DOTALL)
_BATCH = re.compile(r"\s*(\d{1,9})\s*", re.ASCII)


def size_box_reason(size_box: str, width_px: int, height_px: int) -> str | None:
    """Why an image is outside a size box; None when it is inside or the box is empty.

    Raises:
        OptionError: The text is not a size box.
    """
    limits = parse_size_box(size_box)
    if limits is None:
        return None
    (low_w, low_h), (high_w, high_h) = limits
    if low_w <= width_px <= high_w and low_h <= height_px <= high_h:
        return None
    return f"{width_px}x{height_px} is outside the size box {size_box.strip()}"


def batch_range_reason(batch_range: str, batch: int) -> str | None:
    """Why a batch is outside a batch range; None when it is inside or the range is empty.

    Raises:
        OptionError: The text is not a batch range.
    """
    limits = parse_batch_range(batch_range)
    if limits is None:
        return None
    low, high = limits
    if low <= batch <= high:
        return None
    return f"{batch} at once is outside the batch range {batch_range.strip()}"


def parse_size_box(text: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Read a size box.

    Returns:
        ((width, height) of the smallest picture, of the largest) in pixels; None for an empty text.

    Raises:
        OptionError: The text is not a size box.
    """
    if not text.strip():
        return None
    ends = _RANGE.fullmatch(text)
    low = ends and parse_width_height(ends[1])
    high = ends and parse_width_height(ends[2])
    if not low or not high:
        raise OptionError(f"{shown(text)} is not a size box.", 'Write "256x256 - 2048x2048".')
    if low[0] > high[0] or low[1] > high[1]:
        raise OptionError(f'The size box "{text}" is empty.', "Write the smaller size first.")
    return low, high


def parse_batch_range(text: str) -> tuple[int, int] | None:
    """Read a batch range.

    Returns:
        (fewest, most) pictures at once; None for an empty text.

    Raises:
        OptionError: The text is not a batch range.
    """
    if not text.strip():
        return None
    ends = _RANGE.fullmatch(text)
    low = _BATCH.fullmatch(ends[1] if ends else text)
    high = _BATCH.fullmatch(ends[2]) if ends else low
    if low is None or high is None:
        raise OptionError(f"{shown(text)} is not a batch range.", 'Write "1 - 4".')
    if int(low[1]) > int(high[1]):
        raise OptionError(f'The batch range "{text}" is empty.', "Write the smaller number first.")
    return int(low[1]), int(high[1])

"""The sizes of one image: its own, its result's, and its canvas.

The *target* is the size of the result; it may be any whole number of pixels. The *canvas* is the
size that the model generates: the target rounded up to multiples of 8, and at least 64. An image
of 1001x667 is generated on 1008x672 and comes out at 1001x667.
"""

from __future__ import annotations

from dataclasses import dataclass

from onediff_ext.core.errors import ShapeError
from onediff_ext.core.shapes import CELL_PX, MIN_SIDE_PX, round_up
from onediff_ext.pictures.size_rules import (
    MAX_RESULT_SIDE_PX,
    FixedSize,
    LongestSide,
    Placement,
    SizeRule,
    target_size,
)

MAX_MEGAPIXELS = 4.2


@dataclass(frozen=True)
class Fit:
    """One image's way from its own size to the canvas and back.

    Args:
        source_width_px, source_height_px: The image, upright.
        target_width_px, target_height_px: The result.
        canvas_width_px, canvas_height_px: The generated size, multiples of 8. The target lies in
            its upper left corner.
        placement: How the image fills the target.
    """

    source_width_px: int
    source_height_px: int
    target_width_px: int
    target_height_px: int
    canvas_width_px: int
    canvas_height_px: int
    placement: Placement = "stretch"


def canvas_size(width_px: int, height_px: int) -> tuple[int, int]:
    """Return the canvas of a result: (width, height) in pixels, multiples of 8, at least 64."""
    rows, columns = round_up(max(height_px, MIN_SIDE_PX), max(width_px, MIN_SIDE_PX))
    return columns * CELL_PX, rows * CELL_PX


def fit_size(
    rule: SizeRule, width_px: int, height_px: int, *, max_megapixels: float = MAX_MEGAPIXELS
) -> Fit:
    """Apply a size rule to one image.

    Args:
        rule: From `parse_size_rule`.
        width_px, height_px: The image, upright.
        max_megapixels: Largest canvas, in millions of pixels.

    Raises:
        ShapeError: The canvas would be larger, or a side is not positive.
    """
    target_width_px, target_height_px = target_size(rule, width_px, height_px)
    canvas_width_px, canvas_height_px = canvas_size(target_width_px, target_height_px)
    fit = Fit(
        source_width_px=width_px,
        source_height_px=height_px,
        target_width_px=target_width_px,
        target_height_px=target_height_px,
        canvas_width_px=canvas_width_px,
        canvas_height_px=canvas_height_px,
        placement=rule.placement if isinstance(rule, FixedSize) else "stretch",
    )
    if not _is_within(canvas_width_px, canvas_height_px, max_megapixels):
        megapixels = canvas_width_px * canvas_height_px / 1e6
        raise ShapeError(
            f"A result of {target_width_px}x{target_height_px} ({megapixels:.1f} megapixels) "
            f"is over the limit of {max_megapixels:g} megapixels.",
            f"Use a smaller size, for example longest:{_side_within(fit, max_megapixels)}:shrink, "
            "or raise the limit.",
        )
    return fit


def _is_within(width_px: int, height_px: int, max_megapixels: float) -> bool:
    longest_px = max(width_px, height_px)
    return width_px * height_px <= max_megapixels * 1e6 and longest_px <= MAX_RESULT_SIDE_PX


def _side_within(fit: Fit, max_megapixels: float) -> int:
    """Return a longest side, a multiple of 64, whose canvas is within the limit."""
    longest_px = min(max(fit.target_width_px, fit.target_height_px), MAX_RESULT_SIDE_PX)
    for side_px in range(longest_px // MIN_SIDE_PX * MIN_SIDE_PX, MIN_SIDE_PX, -MIN_SIDE_PX):
        target = target_size(LongestSide(side_px), fit.target_width_px, fit.target_height_px)
        if _is_within(*canvas_size(*target), max_megapixels):
            return side_px
    return MIN_SIDE_PX

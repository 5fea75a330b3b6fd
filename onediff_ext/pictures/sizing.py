"""The sizing rule: how large each picture's result is.

Two sizes are kept apart. The *target* is the size of the result and may be any whole
number of pixels. The *canvas* is what the model generates: the target rounded up to
multiples of 8, and at least 64. A picture of 1001x667 is generated on 1008x672 and
comes out at 1001x667.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from onediff_ext.core.errors import OptionError, ShapeError
from onediff_ext.core.shapes import CELL_PX, MIN_SIDE_PX, parse_width_height, round_up

Placement = Literal["crop", "pad", "stretch"]

MAX_MEGAPIXELS = 4.2
_MAX_SIDE_PX = 16384
SUGGESTED_RULES = (
    "own",
    "scale:0.5",
    "longest:512",
    "longest:768",
    "longest:1024",
    "longest:1024:shrink",
    "fixed:512x512",
)
"""Rules that a list in a user interface offers."""

_HINT = 'Use "own", "scale:0.5", "longest:768", "longest:768:shrink" or "fixed:512x512:crop".'


@dataclass(frozen=True)
class OwnSize:
    """Each picture keeps its own size."""

    def __str__(self) -> str:
        return "own"


@dataclass(frozen=True)
class ScaledSize:
    """Each side times a factor."""

    factor: float

    def __str__(self) -> str:
        return f"scale:{self.factor:g}"


@dataclass(frozen=True)
class LongestSide:
    """The longer side becomes `side_px`, the other keeps the proportions.

    Args:
        side_px: In pixels.
        only_shrink: Leave pictures alone that are smaller.
    """

    side_px: int
    only_shrink: bool = False

    def __str__(self) -> str:
        return f"longest:{self.side_px}" + (":shrink" if self.only_shrink else "")


@dataclass(frozen=True)
class FixedSize:
    """Every result has one size.

    Args:
        width_px, height_px: The size of the results.
        placement: ``crop`` covers it and cuts the rest off around the centre, ``pad``
            shows the whole picture and repeats its edges around it, ``stretch``
            changes the proportions.
    """

    width_px: int
    height_px: int
    placement: Placement = "crop"

    def __str__(self) -> str:
        return f"fixed:{self.width_px}x{self.height_px}:{self.placement}"


SizeRule = OwnSize | ScaledSize | LongestSide | FixedSize


@dataclass(frozen=True)
class Fit:
    """One picture's way from its own size to the canvas and back.

    Args:
        source_width_px, source_height_px: The picture, upright.
        target_width_px, target_height_px: The result.
        canvas_width_px, canvas_height_px: What is generated, multiples of 8. The
            target lies in its upper left corner.
        placement: How the picture fills the target.
    """

    source_width_px: int
    source_height_px: int
    target_width_px: int
    target_height_px: int
    canvas_width_px: int
    canvas_height_px: int
    placement: Placement = "stretch"


def parse_size_rule(text: str) -> SizeRule:
    """Read a sizing rule.

    Args:
        text: ``own``, ``scale:FACTOR``, ``longest:PIXELS``, ``longest:PIXELS:shrink``,
            ``fixed:WIDTHxHEIGHT`` or ``fixed:WIDTHxHEIGHT:crop|pad|stretch``. What
            ``str()`` makes of a rule reads back as the same rule.

    Raises:
        OptionError: The text is no rule, or its numbers cannot be used.
    """
    kind, *rest = (part.strip() for part in text.strip().lower().split(":"))
    try:
        if kind == "own" and not rest:
            return OwnSize()
        if kind == "scale" and len(rest) == 1:
            return ScaledSize(_factor(rest[0]))
        if kind == "longest" and (len(rest) == 1 or rest[1:] == ["shrink"]):
            return LongestSide(_checked_side(int(rest[0])), only_shrink=len(rest) == 2)
        if kind == "fixed" and len(rest) in (1, 2):
            return _fixed(*rest)
    except ValueError as exc:
        raise OptionError(f'The sizing rule "{text}" cannot be used: {exc}.', _HINT) from exc
    raise OptionError(f'"{text}" is not a sizing rule.', _HINT)


def fit_size(
    rule: SizeRule, width_px: int, height_px: int, *, max_megapixels: float = MAX_MEGAPIXELS
) -> Fit:
    """Apply a rule to one picture's size.

    Args:
        rule: From `parse_size_rule`.
        width_px, height_px: The picture, upright.
        max_megapixels: Largest canvas, in millions of pixels.

    Raises:
        ShapeError: The canvas would be larger, or a side is not positive.
    """
    target_width_px, target_height_px = _target(rule, width_px, height_px)
    canvas_width_px, canvas_height_px = _canvas(target_width_px, target_height_px)
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


def _target(rule: SizeRule, width_px: int, height_px: int) -> tuple[int, int]:
    if width_px < 1 or height_px < 1:
        raise ShapeError(f"A picture of {width_px}x{height_px} pixels is empty.", "Leave it out.")
    if isinstance(rule, FixedSize):
        return rule.width_px, rule.height_px
    if isinstance(rule, ScaledSize):
        return _scaled(width_px, rule.factor), _scaled(height_px, rule.factor)
    longest_px = max(width_px, height_px)
    if isinstance(rule, OwnSize) or (rule.only_shrink and longest_px <= rule.side_px):
        return width_px, height_px
    # In whole numbers: a factor would lose a pixel here and there.
    double = 2 * longest_px
    return (
        max(1, (width_px * rule.side_px * 2 + longest_px) // double),
        max(1, (height_px * rule.side_px * 2 + longest_px) // double),
    )


def _scaled(side_px: int, factor: float) -> int:
    return max(1, math.floor(side_px * factor + 0.5))


def _canvas(width_px: int, height_px: int) -> tuple[int, int]:
    rows, columns = round_up(max(height_px, MIN_SIDE_PX), max(width_px, MIN_SIDE_PX))
    return columns * CELL_PX, rows * CELL_PX


def _is_within(width_px: int, height_px: int, max_megapixels: float) -> bool:
    return width_px * height_px <= max_megapixels * 1e6 and max(width_px, height_px) <= _MAX_SIDE_PX


def _side_within(fit: Fit, max_megapixels: float) -> int:
    """Return a longest side, a multiple of 64, whose canvas is within the limit."""
    longest_px = min(max(fit.target_width_px, fit.target_height_px), _MAX_SIDE_PX)
    for side_px in range(longest_px // MIN_SIDE_PX * MIN_SIDE_PX, MIN_SIDE_PX, -MIN_SIDE_PX):
        target = _target(LongestSide(side_px), fit.target_width_px, fit.target_height_px)
        if _is_within(*_canvas(*target), max_megapixels):
            return side_px
    return MIN_SIDE_PX


def _factor(text: str) -> float:
    factor = float(text)
    if not 0.01 <= factor <= 16:
        raise ValueError("the factor must be from 0.01 to 16")
    return factor


def _checked_side(side_px: int) -> int:
    if not 1 <= side_px <= _MAX_SIDE_PX:
        raise ValueError(f"a side must be from 1 to {_MAX_SIDE_PX} pixels")
    return side_px


def _fixed(size: str, placement: str = "crop") -> FixedSize:
    sides = parse_width_height(size)
    if sides is None:
        raise ValueError(f'"{size}" is not WIDTHxHEIGHT')
    if placement not in ("crop", "pad", "stretch"):
        raise ValueError(f'"{placement}" is not crop, pad or stretch')
    return FixedSize(_checked_side(sides[0]), _checked_side(sides[1]), cast(Placement, placement))

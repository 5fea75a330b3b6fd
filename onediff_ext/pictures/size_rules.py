"""Size rules such as ``longest:1024`` or ``scale:0.5``: how large each image's result is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from onediff_ext.core.errors import OptionError, ShapeError
from onediff_ext.core.shapes import parse_width_height
from onediff_ext.core.words import number_text

Placement = Literal["crop", "pad", "stretch"]

MAX_RESULT_SIDE_PX = 16384
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
    """Each image keeps its own size."""

    def __str__(self) -> str:
        return "own"


@dataclass(frozen=True)
class ScaledSize:
    """Each side is multiplied by a factor."""

    factor: float

    def __str__(self) -> str:
        return f"scale:{number_text(self.factor)}"


@dataclass(frozen=True)
class LongestSide:
    """The longer side becomes `side_px`, the other keeps the proportions.

    Args:
        side_px: In pixels.
        only_shrink: Smaller images keep their size.
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
        placement: ``crop`` fills the size and cuts off the rest around the centre, ``pad`` shows
            the whole image and repeats its edges around it, ``stretch`` changes the proportions.
    """

    width_px: int
    height_px: int
    placement: Placement = "crop"

    def __str__(self) -> str:
        return f"fixed:{self.width_px}x{self.height_px}:{self.placement}"


SizeRule = OwnSize | ScaledSize | LongestSide | FixedSize


def parse_size_rule(text: str) -> SizeRule:
    """Read a size rule.

    Args:
        text: ``own``, ``scale:FACTOR``, ``longest:PIXELS``, ``longest:PIXELS:shrink``,
            ``fixed:WIDTHxHEIGHT`` or ``fixed:WIDTHxHEIGHT:crop|pad|stretch``. ``str()`` of a
            rule reads back as the same rule.

    Raises:
        OptionError: The text is not a rule, or its numbers cannot be used.
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


def target_size(rule: SizeRule, width_px: int, height_px: int) -> tuple[int, int]:
    """Return (width, height) in pixels of an image's result under a rule.

    Raises:
        ShapeError: A side is not positive.
    """
    if width_px < 1 or height_px < 1:
        raise ShapeError(f"A picture of {width_px}x{height_px} pixels is empty.", "Leave it out.")
    if isinstance(rule, FixedSize):
        return rule.width_px, rule.height_px
    if isinstance(rule, ScaledSize):
        return _scaled(width_px, rule.factor), _scaled(height_px, rule.factor)
    longest_px = max(width_px, height_px)
    if isinstance(rule, OwnSize) or (rule.only_shrink and longest_px <= rule.side_px):
        return width_px, height_px
    # Integer arithmetic: a float factor would be a pixel off now and then.
    double = 2 * longest_px
    return (
        max(1, (width_px * rule.side_px * 2 + longest_px) // double),
        max(1, (height_px * rule.side_px * 2 + longest_px) // double),
    )


def _scaled(side_px: int, factor: float) -> int:
    return max(1, math.floor(side_px * factor + 0.5))


def _factor(text: str) -> float:
    factor = float(text)
    if not 0.01 <= factor <= 16:
        raise ValueError("the factor must be from 0.01 to 16")
    return factor


def _checked_side(side_px: int) -> int:
    if not 1 <= side_px <= MAX_RESULT_SIDE_PX:
        raise ValueError(f"a side must be from 1 to {MAX_RESULT_SIDE_PX} pixels")
    return side_px


def _fixed(size: str, placement: str = "crop") -> FixedSize:
    sides = parse_width_height(size)
    if sides is None:
        raise ValueError(f'"{size}" is not WIDTHxHEIGHT')
    if placement not in ("crop", "pad", "stretch"):
        raise ValueError(f'"{placement}" is not crop, pad or stretch')
    return FixedSize(_checked_side(sides[0]), _checked_side(sides[1]), cast(Placement, placement))

"""Types of command-line arguments: numbers and lists of sizes."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import OptionError

if TYPE_CHECKING:
    from onediff_ext.core.shapes import BatchShape

_MAX_AMOUNT = 1e12


def amount(text: str) -> float:
    """Read a number from 0 to 1e12, for argparse: bytes and seconds must not overflow."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MAX_AMOUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {_MAX_AMOUNT:g}")
    return number


def positive_amount(text: str) -> float:
    """Read a number above zero, for argparse."""
    number = amount(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above zero")
    return number


def positive_count(text: str) -> int:
    """Read a whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or above")
    return int(text)


def named_path(text: str) -> Path:
    """Read a path, for argparse. An empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def picture_path(text: str) -> Path:
    """Read the path or URL of pictures, for argparse."""
    from onediff_ext.pictures.urls import parse_path

    named_path(text)
    try:
        return parse_path(text)
    except OptionError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def folder_path(text: str) -> Path:
    """Read the path of a folder that exists or will be made, for argparse."""
    if os.path.isfile(text):  # Path.is_file raises for a name that is too long
        raise argparse.ArgumentTypeError(f"{text} is a file, not a folder")
    return named_path(text)


def required_sizes(text: str) -> list[BatchShape]:
    """Read a list of sizes with at least one entry.

    Raises:
        OptionError: The list is empty.
        ShapeError: An entry is not a size, or cannot be generated.
    """
    from onediff_ext.core.shapes import parse_sizes

    shapes = parse_sizes(text)
    if not shapes:
        raise OptionError("No size is given.", 'Write for example "512x768, 720x960@2".')
    return shapes

"""Words for people that several places need."""

from __future__ import annotations

import time
import unicodedata


def counted(count: int, what: str) -> str:
    """Such as "1 graph" and "2 graphs".

    Args:
        count: How many.
        what: One of them; its plural ends with an s.
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def duration(seconds: float) -> str:
    """Such as "18 s" and "3 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def day_of(seconds: float) -> str:
    """Such as "2025-10-09", in local time; "an unknown day" for what no calendar has.

    Args:
        seconds: Since the epoch, perhaps from a file.
    """
    try:
        return time.strftime("%Y-%m-%d", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "an unknown day"


def printable(text: str) -> str:
    """Text from files on one line of a terminal, and without a way to command the terminal.

    Control characters, escape sequences, marks that change the direction of text and lone
    surrogates become escapes such as ``\\x1b``; line feeds and tabs become spaces.
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) == "Zs":
        return " "
    return character.encode("unicode_escape").decode("ascii")

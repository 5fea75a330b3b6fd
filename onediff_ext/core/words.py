"""Small texts for people that several modules share."""

from __future__ import annotations

import time
import unicodedata

from onediff_ext.core.url_secrets import without_secrets

LEAST_GAIN = 1.05
"""How many times faster something must be before a gain is claimed: less is noise."""


def times_faster(speedup: float) -> str | None:
    """Return a measured speed-up as every place shows it, such as "2.3"; None if it is noise.

    Args:
        speedup: Eager time over compiled time.
    """
    return f"{speedup:.1f}" if speedup >= LEAST_GAIN else None


def counted(count: int, what: str) -> str:
    """Return a count with its noun, such as "1 graph" or "2 graphs".

    Args:
        count: The number.
        what: The noun in singular; its plural ends with an s.
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def duration(seconds: float) -> str:
    """Such as "18 s" and "3 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def day_of(seconds: float) -> str:
    """Return a date such as "2025-10-09" in local time; "an unknown day" outside the calendar.

    Args:
        seconds: Since the epoch; may come from an untrusted file.
    """
    try:
        return time.strftime("%Y-%m-%d", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "an unknown day"


def first_line(text: str, if_empty: str = "no message") -> str:
    """Return the first line of a message that is not blank, stripped.

    Args:
        text: Often ``str(exc)``.
        if_empty: Returned when every line is blank.
    """
    return next((line.strip() for line in text.splitlines() if line.strip()), if_empty)


def number_text(value: float) -> str:
    """Return a number's shortest text that reads back as the same number: "2", "0.08"."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def typed(value: object) -> str:
    """Name a value of a wrong type at a sentence's start: "A str", "The class Path" or "None"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"The class {value.__name__}"
    name = type(value).__name__
    return f"{'An' if name[:1].lower() in 'aeiou' else 'A'} {name}"


def printable(text: str) -> str:
    """Return untrusted text as one line that cannot control a terminal and shows no password.

    Control characters, escape sequences, marks that change the direction of text and lone
    surrogates become escapes such as ``\\x1b``; line feeds and tabs become spaces. Passwords of
    URLs become ``***``.
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in without_secrets(text))


def _escaped(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) == "Zs":
        return " "
    return character.encode("unicode_escape").decode("ascii")

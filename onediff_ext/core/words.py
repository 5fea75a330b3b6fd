"""Words for people that several places need."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """Such as "1 graph" and "2 graphs".

    Args:
        count: How many.
        what: One of them; its plural ends with an s.
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"

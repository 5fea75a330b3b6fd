"""Which half of its batch a model's forward runs for, when memory is short."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Present(threading.local):
    number: int | None = None


_present = _Present()


def present_half() -> int | None:
    """Return 0 or 1 within a forward of one half, in this thread; None within a whole one."""
    return _present.number


@contextmanager
def half_of_batch(number: int) -> Iterator[None]:
    """Say within the ``with`` block that a forward runs for one half.

    Args:
        number: 0 for the first rows of the batch, 1 for the others.
    """
    _present.number = number
    try:
        yield
    finally:
        _present.number = None

"""Pausing Python's garbage collection while imports and models load."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onediff_ext.core.forks import WhileWanted

# Python 3.12 freezes some hundred objects of its own when it starts.
_FROZEN_BY_PYTHON = 1000


def _pause() -> Callable[[], object]:
    was_on = gc.isenabled()
    gc.disable()
    return _resume if was_on else lambda: None


def _resume() -> None:
    if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
        gc.freeze()
        gc.unfreeze()  # all that is frozen, also what somebody else froze
    gc.enable()


_pausing = WhileWanted(_pause)


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause garbage collection within this ``with`` block, in all threads.

    Imports and models create objects that stay, and each collection would walk through all of
    them. At the end they move to the oldest generation, so the next collection skips them. They
    do not where the program has frozen objects, which stay frozen. Collection stays off where it
    was off before.
    """
    with _pausing.wanted():
        yield

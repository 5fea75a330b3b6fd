"""Pausing Python's garbage collection while imports and models load."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Python 3.12 freezes some hundred objects of its own when it starts.
_FROZEN_BY_PYTHON = 1000


class _Collection:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unwanted = 0
        self._was_on = False

    def change(self, by: int) -> None:
        with self._lock:
            if not self._unwanted:
                self._was_on = gc.isenabled()
                gc.disable()
            self._unwanted += by
            if not self._unwanted and self._was_on:
                if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
                    gc.freeze()
                    gc.unfreeze()  # all that is frozen, also what somebody else froze
                gc.enable()


_collection = _Collection()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause garbage collection within this ``with`` block, in all threads.

    Imports and models create objects that stay, and each collection would walk through all of
    them. At the end they move to the oldest generation, so the next collection skips them. They
    do not where the program has frozen objects, which stay frozen. Collection stays off where it
    was off before.
    """
    _collection.change(1)
    try:
        yield
    finally:
        _collection.change(-1)

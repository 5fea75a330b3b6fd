"""Pausing Python's garbage collection while imports and models load."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from onediff_ext.core.forks import ThreadCounts, forgets_threads, fork_safe_lock

# Python 3.12 freezes some hundred objects of its own when it starts.
_FROZEN_BY_PYTHON = 1000


class _Collection:
    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._unwanted = ThreadCounts()
        self._was_on = False
        forgets_threads(self)

    def pause(self) -> None:
        with self._lock:
            is_first = not self._unwanted
            self._unwanted.enter()
            if is_first:
                self._was_on = gc.isenabled()
                gc.disable()

    def resume(self) -> None:
        with self._lock:
            self._unwanted.leave()
            self._settle()

    def forget_other_threads(self) -> None:
        if self._unwanted:
            self._unwanted.forget_other_threads()
            self._settle()

    def _settle(self) -> None:
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
    _collection.pause()
    try:
        yield
    finally:
        _collection.resume()

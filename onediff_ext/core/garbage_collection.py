"""Python's garbage collection, which has nothing to find while a process starts."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


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
                gc.freeze()
                gc.unfreeze()
                gc.enable()


_collection = _Collection()


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage within this ``with`` block, or within another thread's.

    What imports and models make stays, and each collection looks at all there is so far. It goes to
    the oldest generation, so that the first collection after the block does not look at it either.
    Where collection is switched off, it stays off.
    """
    _collection.change(1)
    try:
        yield
    finally:
        _collection.change(-1)

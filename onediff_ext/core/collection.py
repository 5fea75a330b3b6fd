"""Python's garbage collection, which has nothing to find while a process starts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage within this ``with`` block.

    Imports and models are half a million objects that stay, and each collection looks at all
    there are so far: together more than a quarter of the time that importing torch, diffusers and
    transformers takes. What was made goes to the oldest generation, so that the first collection
    after the block does not look at it either. May be nested; where collection is switched off, it
    stays off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.unfreeze()
            gc.enable()

"""Running out of memory halves the batch, down to single images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from onediff_ext.engine.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


def draw_in_halves(
    draw: Callable[[slice], ResultT], batch: slice
) -> Iterator[tuple[slice, ResultT | None]]:
    """Draw a batch at once, or in halves when it does not fit into memory.

    Args:
        draw: Draws the images of a slice of the batch.
        batch: The slice to draw; start and stop are set.

    Yields:
        (slice, result) of each part, in order. The result is None for a single image that does
        not fit.
    """
    result: ResultT | None = None
    try:
        result = draw(batch)
    except (RuntimeError, MemoryError) as exc:
        if not is_out_of_memory(exc):
            raise
    # Outside the handler: its exception would keep the tensors of the failed attempt alive.
    if result is not None:
        yield batch, result
        return
    torch.cuda.empty_cache()
    count = batch.stop - batch.start
    if count == 1:
        yield batch, None
        return
    logger.info("A batch of %d does not fit into memory: halved", count)
    middle = batch.start + count // 2
    yield from draw_in_halves(draw, slice(batch.start, middle))
    yield from draw_in_halves(draw, slice(middle, batch.stop))

"""What is given up, step by step, when a model's forward runs out of memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.half_batches import run_in_halves
from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)


class Retry(Enum):
    """How a forward that ran out of memory may be tried again."""

    NOT = "not"  # somebody else's code runs in it, and may count its calls
    WHOLE = "whole"  # it has no side effects
    IN_HALVES = "in halves"  # and the images of its batch do not depend on each other


class OomFallback:
    """A forward that gives way when memory is short, and raises only when nothing is left.

    Captures go first, since they can be made again; then the batch is halved; at last the
    blocks run without graphs, which need a little more than eager where layouts are copied.
    What is raised then is what the model would have raised by itself, so that a host's own
    way out (tiles, another device) is open as ever.

    Args:
        forward: The model's own.
        captures: Where captures are kept.
        retry: How a call with these arguments may be tried again.
        eager: Within it, the model runs without graphs; None if that is no way out.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        captures: CudaGraphCache,
        retry: Callable[[Sequence[Any], dict[str, Any]], Retry],
        eager: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._forward, self._captures = forward, captures
        self._retry, self._eager = retry, eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._forward(*args, **kwargs)
        except OutOfMemoryError as exc:
            error = _alone(exc)
        dropped = self._captures.drop_all("memory is short")
        logger.info("Short of memory: %d captures dropped, once more", dropped)
        _free_caches()
        retry = self._retry(args, kwargs)
        if retry is Retry.NOT:
            raise error
        try:
            return self._forward(*args, **kwargs)
        except OutOfMemoryError as exc:
            error = _alone(exc)
        try:
            if retry is not Retry.IN_HALVES:
                raise error
            return run_in_halves(self._forward, args, kwargs, error)
        except OutOfMemoryError as exc:
            if self._eager is None:
                raise
            _alone(exc)
        logger.info("Short of memory: once more without graphs")
        _free_caches()
        with self._eager():
            return self._forward(*args, **kwargs)


def _alone(error: RuntimeError) -> RuntimeError:
    """An error without the frames that it came through, and those of the error that it was raised
    for: they hold the activations."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _free_caches() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA is not in use

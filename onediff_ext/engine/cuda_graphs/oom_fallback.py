"""The OOM fallback: the steps that a forward takes when it runs out of memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch

from onediff_ext.engine.cuda_graphs.argument_containers import ArgumentContainers
from onediff_ext.engine.cuda_graphs.attribute_rollback import ScaleRollback
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.forward_call import read_call
from onediff_ext.engine.cuda_graphs.half_batches import run_in_halves
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)


class Retry(Enum):
    """How a forward that ran out of memory may be tried again."""

    NOT = "not"  # another extension's code runs in it and may count its calls
    WHOLE = "whole"  # the forward has no side effects
    IN_HALVES = "in halves"  # and the images of a batch do not depend on each other


class OomFallback:
    """A forward that frees memory and runs again when memory is short.

    First all CUDA graphs are dropped, since they can be recorded again. Then the batch is halved.
    At last the blocks run without graphs, which take a little more memory than eager where layouts
    are copied. If that fails too, the model's own error is raised, so that a host's own fallback
    (tiles, another device) works as without this.

    Args:
        forward: The model's own.
        cuda_graphs: Holds the CUDA graphs of the session.
        retry: Tells how a call with these arguments may be tried again.
        eager: A context in which the model runs without graphs; None if that saves nothing.
        scales: Returns the scales that a forward with these arguments may leave changed when it
            fails; None for none.

    Raises:
        torch.OutOfMemoryError: By a call, when nothing is left to give up.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        cuda_graphs: CudaGraphCache,
        retry: Callable[[Sequence[Any], dict[str, Any]], Retry],
        eager: Callable[[], AbstractContextManager[None]] | None = None,
        scales: Callable[[Sequence[Any], dict[str, Any]], ScaleRollback] | None = None,
    ) -> None:
        self._forward, self._cuda_graphs = forward, cuda_graphs
        self._retry, self._eager, self._scales = retry, eager, scales

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _Before(args, kwargs, self._scales(args, kwargs) if self._scales else None)
        try:
            return self._forward(*args, **kwargs)
        except OutOfMemoryError as exc:
            error = _without_frames(exc)
        dropped = self._cuda_graphs.drop_all("memory is short")
        logger.info("Memory is short: %d CUDA graphs dropped, trying again", dropped)
        _free_caches()
        retry = self._retry(args, kwargs)
        if retry is Retry.NOT:
            raise error
        before.restore()
        try:
            return self._forward(*args, **kwargs)
        except OutOfMemoryError as exc:
            error = _without_frames(exc)
        before.restore()
        try:
            if retry is not Retry.IN_HALVES:
                raise error
            return run_in_halves(self._forward, args, kwargs, error)
        except OutOfMemoryError as exc:
            if self._eager is None:
                raise
            _without_frames(exc)
        before.restore()
        logger.info("Memory is short: trying again without graphs")
        _free_caches()
        with self._eager():
            return self._forward(*args, **kwargs)


class _Before:
    """What a forward may change: containers of its arguments, scales of wrappers."""

    def __init__(
        self, args: Sequence[Any], kwargs: dict[str, Any], scales: ScaleRollback | None
    ) -> None:
        self._containers, self._scales = ArgumentContainers(args, kwargs), scales

    def restore(self) -> None:
        """Make both as they were."""
        self._containers.restore()
        if self._scales is not None:
            self._scales.restore()


def retry_of(snapshot: Snapshot, args: Sequence[Any], kwargs: dict[str, Any]) -> Retry:
    """Return how a forward that ran out of memory may be tried again.

    Args:
        snapshot: Of its model.
        args, kwargs: Of the call.
    """
    if snapshot.refusal_reason is not None:
        return Retry.NOT
    is_known = not isinstance(read_call(args, kwargs), str)
    return Retry.IN_HALVES if is_known and snapshot.is_per_image else Retry.WHOLE


def _without_frames(error: RuntimeError) -> RuntimeError:
    """An error without its traceback and its causes, whose frames hold the activations."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _free_caches() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA is not in use

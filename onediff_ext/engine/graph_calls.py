"""Calls of graphs, visible to a recorder of a whole forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from onediff_ext.engine.backend_port import Graph


class GraphObserver(ABC):
    """Sees the calls of graphs, which are no operators of torch."""

    @abstractmethod
    def call(self, graph: Graph, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Call a graph.

        Args:
            graph: As `Backend.load` returned it.
            arguments: The block's weights, then its input tensors.

        Returns:
            The graph's outputs.
        """

    def copy(self, weights: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Copy weights for the next call of a graph.

        Args:
            weights: In main memory.
            device: A GPU.

        Returns:
            The copies, with the same strides. Only that call may read them.
        """
        return copied(weights, device)


_observers: ContextVar[tuple[GraphObserver, ...]] = ContextVar("graph_observers", default=())


def run_graph(graph: Graph, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Call a graph; observers see the call.

    Args:
        graph: As `Backend.load` returned it.
        arguments: The block's weights, then its input tensors.

    Returns:
        The graph's outputs.
    """
    observers = _observers.get()
    if not observers:
        return graph(arguments)
    *outer, last = observers
    token = _observers.set(tuple(outer))
    try:
        return last.call(lambda given: run_graph(graph, given), arguments)
    finally:
        _observers.reset(token)


def copy_weights(weights: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy weights to a GPU for the next call of a graph; observers may do it in their own way.

    Args:
        weights: In main memory.
        device: The GPU.

    Returns:
        The copies, with the same strides. Only that call may read them.

    Raises:
        torch.OutOfMemoryError: There is no memory for the copies.
    """
    observers = _observers.get()
    return observers[-1].copy(weights, device) if observers else copied(weights, device)


def copied(weights: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy weights to a GPU, which may still read pinned memory on return.

    Args:
        weights: In main memory.
        device: The GPU.

    Returns:
        The copies.
    """
    return [weight.to(device, non_blocking=True) for weight in weights]


def is_observed() -> bool:
    """Return whether a forward is being recorded."""
    return bool(_observers.get())


@contextmanager
def observed_by(observer: GraphObserver) -> Iterator[None]:
    """Show an observer all calls of graphs within the ``with`` block.

    Args:
        observer: Calls each graph itself. Of several the innermost is asked first.
    """
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)

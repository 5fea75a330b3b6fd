"""Which memory a recording reads that it did not allocate itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.cuda_graphs.recorder import Recorder, Recording
from onediff_ext.engine.graph_calls import GraphObserver, observed_by


class MemoryReads(TorchDispatchMode, GraphObserver):  # type: ignore[no-untyped-call]
    """While a forward is recorded: sees each operator and each graph, and what they read.

    Attributes:
        storages: Storages that were read and not allocated meanwhile, by address.
    """

    observes_only = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()
        self._in_graph = False
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._in_graph:  # its own memory; whatever else it reads are its arguments
            return func(*args, **(kwargs or {}))
        self._note_read((args, kwargs))
        output = func(*args, **(kwargs or {}))
        self._note_made(output)
        return output

    def call(self, graph: Graph, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        self._note_read(arguments)
        self._in_graph = True
        try:
            output = graph(arguments)
        finally:
            self._in_graph = False
        self._note_made(output)
        return output

    def _note_read(self, given: Any) -> None:
        for storage in _storages(given):
            place = storage.data_ptr()
            if place and storage._cdata not in self._made:
                self.storages.setdefault(place, storage)

    def _note_made(self, given: Any) -> None:
        for storage in _storages(given):
            if storage.data_ptr() not in self.storages:  # no view of what was there before
                self._made.add(storage._cdata)


def record_and_look(
    recorder: Recorder, function: Callable[[], Any], device: torch.device, *, lasting: bool = False
) -> tuple[Recording, MemoryReads]:
    """Record what a function does, and see what that reads.

    Autocast keeps weights that it has cast until its ``with`` block ends: a recording would go on
    reading the copies, so there are none while it is made.

    Raises:
        CaptureError, torch.OutOfMemoryError: As `Recorder.record`.
    """
    reads = MemoryReads()

    def watched() -> Any:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with reads, observed_by(reads):
                return function()
        finally:
            torch.set_autocast_cache_enabled(cached)

    return recorder.record(watched, device, lasting), reads


def owned(
    reads: MemoryReads, places: Collection[int], own: Sequence[torch.Tensor]
) -> list[torch.UntypedStorage]:
    """What a capture keeps alive itself: all that it reads but for the model's weights, whose
    places are compared before each replay.

    Args:
        reads: Of the recording.
        places: Of the model's weights.
        own: Tensors that the capture has anyway.
    """
    held = {tensor.untyped_storage().data_ptr() for tensor in own}
    return [s for place, s in reads.storages.items() if place not in places and place not in held]


def _storages(given: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in pytree.tree_flatten(given)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage()

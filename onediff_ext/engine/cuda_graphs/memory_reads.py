"""The memory that a recording reads and has not allocated itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.cuda_graphs.recorder import Recorder, Recording
from onediff_ext.engine.graph_calls import GraphObserver, observed_by


class MemoryReads(TorchDispatchMode, GraphObserver):  # type: ignore[no-untyped-call]
    """Observes each operator and each graph while a forward is recorded, and notes what they read.

    Attributes:
        storages: By address, the storages that were read and were not allocated meanwhile.
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
        if self._in_graph:  # reads its own memory and its arguments, which are noted already
            return func(*args, **(kwargs or {}))
        self._note_read((args, kwargs))
        output = func(*args, **(kwargs or {}))
        self._note_made(output)
        return output

    def call(self, graph: Graph, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self._note_read(arguments)
        self._in_graph = True
        try:
            outputs = graph(arguments)
        finally:
            self._in_graph = False
        self._note_made(outputs)
        return outputs

    def _note_read(self, given: Any) -> None:
        for storage in _storages(given):
            place = storage.data_ptr()
            if place and storage._cdata not in self._made:
                self.storages.setdefault(place, storage)

    def _note_made(self, given: Any) -> None:
        for storage in _storages(given):
            if storage.data_ptr() not in self.storages:  # no view of what was there before
                self._made.add(storage._cdata)


def record_and_observe(
    recorder: Recorder, function: Callable[[], Any], device: torch.device, *, lasting: bool = False
) -> tuple[Recording, MemoryReads]:
    """Record a function, and observe what it reads.

    Autocast caches the weights that it has cast until its ``with`` block ends. A recording would
    read these copies after they are gone, so the cache is off while it is made.

    Args:
        recorder, function, device, lasting: As `Recorder.record` takes them.

    Returns:
        The recording, and what it reads.

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


def owned_storages(
    reads: MemoryReads, places: Collection[int], own: Sequence[torch.Tensor]
) -> list[torch.UntypedStorage]:
    """Return the storages that a CUDA graph has to keep alive itself.

    These are all that it reads, except the model's weights: their places are compared before each
    replay.

    Args:
        reads: Of the recording.
        places: Addresses of the storages of the model's weights.
        own: Tensors that the CUDA graph holds anyway.
    """
    held = {tensor.untyped_storage().data_ptr() for tensor in own}
    return [s for place, s in reads.storages.items() if place not in places and place not in held]


def _storages(given: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in an operator's arguments, or in what it returned."""
    if isinstance(given, torch.Tensor):
        yield given.untyped_storage()
    elif isinstance(given, (tuple, list)):
        for each in given:
            yield from _storages(each)
    elif isinstance(given, dict):
        yield from _storages(list(given.values()))

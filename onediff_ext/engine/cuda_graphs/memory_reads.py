"""The memory that a recording reads and has not allocated itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from onediff_ext.core.errors import CaptureError
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.blocks.weight_form import copies_alike, is_dense
from onediff_ext.engine.cuda_graphs.copies_ahead import CopiesAhead
from onediff_ext.engine.cuda_graphs.recorder import Recorder, Recording
from onediff_ext.engine.graph_calls import GraphObserver, copied, observed_by
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.engine.torch_versions import OutOfMemoryError

_Made = TypeVar("_Made", bound=Sequence[torch.Tensor])

# There are two buffers of this size at most. Weights of larger blocks are copied without them.
AHEAD_BYTES = 128 * 2**20

_READ_NO_NUMBERS = (torch.ops.aten.empty_like.default,)


class MemoryReads(TorchDispatchMode, GraphObserver):  # type: ignore[no-untyped-call]
    """Observes each operator and each graph while a forward is recorded, and notes what they read.

    A weight in main memory may only be copied to the GPU as it is, by the stream that is recorded:
    the CUDA graph copies it again at each replay. Anything else would happen once, while it is
    recorded. torch converts a weight in main memory before it copies it; here the copy is
    converted on the GPU, which makes the same numbers.

    Args:
        device: The one that the forward runs on.
        streamed: Addresses of the storages of weights that are in main memory.

    Attributes:
        device: As given.
        storages: By address, the storages that were read and were not allocated meanwhile.
        failure: The first refusal, or the first time that memory ran out, where weights are in main
            memory. A host's LoRA code goes on without the LoRA then, and so would the CUDA graph.
    """

    observes_only = True

    def __init__(self, device: torch.device, streamed: Set[int] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self._streamed = device, streamed
        self._stream: object = None
        # Weak references keep the addresses of freed storages from being used again.
        self._made: dict[int, StorageWeakRef] = {}
        self._ahead: CopiesAhead | None = None
        self._is_noted = False
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.failure: Exception | None = None

    def __enter__(self) -> MemoryReads:
        if self._stream is None:
            self._stream = _current_stream(self.device)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._is_noted:
            return func(*args, **(kwargs or {}))
        try:
            return self._observed(func, args, kwargs)
        except Exception as exc:
            self._note_failure(exc)
            raise

    def _observed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        self._note_read((args, kwargs))
        if self._reads_streamed(args, kwargs):
            # Inference mode leaves operators whole: ``to`` may be a view, a copy or a conversion.
            with self:
                output = func.decompose(*args, **(kwargs or {}))
            if output is not NotImplemented:
                return output
            if not getattr(func, "is_view", False) and func not in _READ_NO_NUMBERS:
                copy = self._repeatable_copy(func, args, kwargs or {})
                if copy.dtype != copy.source.dtype:
                    with self:
                        return copy.converted_there()
        output = func(*args, **(kwargs or {}))
        self._note_made(output)
        return output

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor on the device lies in memory that was allocated meanwhile.

        Args:
            tensor: Any tensor.
        """
        is_there = tensor.device == self.device and tensor.layout is torch.strided
        return is_there and tensor.untyped_storage()._cdata in self._made

    def call(self, graph: Graph, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._run(graph, arguments)

    def copy(self, weights: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        fit = sum(weight.nbytes for weight in weights) <= AHEAD_BYTES
        if device.type != "cuda" or not fit or not all(map(self._may_be_copied_ahead, weights)):
            return copied(weights, device)
        self._ahead = self._ahead or CopiesAhead(device)
        return self._run(self._ahead.copy, weights)

    def _may_be_copied_ahead(self, weight: torch.Tensor) -> bool:
        return weight.untyped_storage().data_ptr() in self._streamed and is_dense(weight)

    def _run(
        self, function: Callable[[Sequence[torch.Tensor]], _Made], arguments: Sequence[torch.Tensor]
    ) -> _Made:
        """Call what reads its arguments and its own memory, and note only these."""
        self._note_read(arguments)
        with self._paused():
            made = function(arguments)
        self._note_made(made)
        return made

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """See no operators within the ``with`` block.

        Each one that is seen costs a call of Python, and a graph runs ten of them or more.
        """
        if _get_current_dispatch_mode() is not self:  # another one is within this one
            self._is_noted = True
            try:
                yield
            finally:
                self._is_noted = False
            return
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__enter__()  # type: ignore[no-untyped-call]

    def _reads_streamed(self, *given: Any) -> bool:
        return bool(self._streamed) and not self._streamed.isdisjoint(
            storage.data_ptr() for storage in _storages(given)
        )

    def _repeatable_copy(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Copy:
        """Refuse an operator on a weight in main memory, unless a replay can do the same."""
        copy = _copy_of(func, args, kwargs)
        is_alike = copy is not None and copies_alike(copy.source, copy.dtype)
        if copy is None or not is_alike or self._stream != _current_stream(self.device):
            raise CaptureError(f"{func} reads a weight in main memory")
        return copy

    def _note_failure(self, exc: Exception) -> None:
        """Keep what a host's LoRA code would swallow, without the frames of the forward."""
        if self.failure is None and self._streamed:
            if isinstance(exc, CaptureError):
                self.failure = CaptureError(exc.message)
            elif is_out_of_memory(exc):
                self.failure = OutOfMemoryError(str(exc))

    def _note_read(self, given: Any) -> None:
        for storage in _storages(given):
            place = storage.data_ptr()
            if place and storage._cdata not in self._made:
                self.storages.setdefault(place, storage)

    def _note_made(self, given: Any) -> None:
        for storage in _storages(given):
            if storage._cdata in self._made or storage.data_ptr() in self.storages:
                continue  # the second: a view of what was there before
            make_weak: Any = StorageWeakRef  # not typed
            self._made[storage._cdata] = make_weak(storage)


def record_and_observe(
    recorder: Recorder,
    function: Callable[[], Any],
    reads: MemoryReads,
    *,
    lasting: bool = False,
) -> Recording:
    """Record a function, and observe what it reads.

    Autocast caches the weights that it has cast until its ``with`` block ends. A recording would
    read these copies after they are gone, so the cache is off while it is made.

    Args:
        recorder, function, lasting: As `Recorder.record` takes them.
        reads: Observes the function, on its device.

    Returns:
        The recording.

    Raises:
        CaptureError, torch.OutOfMemoryError: As `Recorder.record`.
    """

    def watched() -> Any:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with reads, observed_by(reads):
                made = function()
            if reads.failure is not None:  # somebody has caught it
                raise reads.failure
            return made
        finally:
            torch.set_autocast_cache_enabled(cached)

    return recorder.record(watched, reads.device, lasting)


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


@dataclass(frozen=True)
class _Copy:
    """A copy from main memory to the GPU in the same order, without a wait.

    Args:
        source: In main memory.
        device, dtype: Of the copy.
        target: Where it is written to; None for a new tensor.
    """

    source: torch.Tensor
    device: torch.device
    dtype: torch.dtype
    target: torch.Tensor | None = None

    def converted_there(self) -> torch.Tensor:
        """Copy the numbers as they are, and convert the copy. torch converts them first."""
        there = self.source.to(self.device, non_blocking=True)
        return there.to(self.dtype) if self.target is None else self.target.copy_(there)


def _copy_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Copy | None:
    """The copy that an operator makes; None for any other operator."""
    if func is torch.ops.aten._to_copy.default:
        source, non_blocking = args[0], kwargs.get("non_blocking", False)
        device = torch.device(kwargs.get("device") or source.device)
        is_in_order = kwargs.get("memory_format") in (None, torch.preserve_format)
        copy = _Copy(source, device, kwargs.get("dtype") or source.dtype)
    elif func is torch.ops.aten.copy_.default:
        target, source = args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        is_in_order = (target.shape, target.stride()) == (source.shape, source.stride())
        copy = _Copy(source, target.device, target.dtype, target)
    else:
        return None
    is_moved = copy.device != source.device and source.is_cpu
    return copy if non_blocking and is_in_order and is_moved else None


def _current_stream(device: torch.device) -> object:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _storages(given: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in an operator's arguments, or in what it returned."""
    if isinstance(given, torch.Tensor):
        yield given.untyped_storage()
    elif isinstance(given, (tuple, list)):
        for each in given:
            yield from _storages(each)
    elif isinstance(given, dict):
        yield from _storages(list(given.values()))

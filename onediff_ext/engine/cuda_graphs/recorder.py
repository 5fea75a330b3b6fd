"""Recordings of GPU work that are replayed without Python: the port, and CUDA graphs behind it."""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch

from onediff_ext.core.errors import CaptureError
from onediff_ext.engine.stopwatch import Stop, stopwatch
from onediff_ext.engine.torch_versions import OutOfMemoryError, end_recording_to_pool

# With so many times the memory that the allocator keeps unused, a recording finds enough.
_ROOMY = 2


class Recording(ABC):
    """The recorded work of one call.

    Attributes:
        output: What the function returned; each replay writes its tensors again.
        size_bytes: Device memory that the recording has added to its pool.
    """

    output: Any
    size_bytes: int

    @abstractmethod
    def replay(self) -> None:
        """Do the work again, which overwrites the tensors in `output`."""


class Recorder(ABC):
    """Makes recordings on one kind of device."""

    @abstractmethod
    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return why nothing can be recorded on a device, or None.

        Args:
            device: Where the work runs.
        """

    @abstractmethod
    def stopwatch(self, device: torch.device) -> Stop:
        """Start a stopwatch behind the work that was launched so far.

        Args:
            device: Where the work runs.

        Returns:
            Stops it.
        """

    @abstractmethod
    def record(
        self, function: Callable[[], Any], device: torch.device, lasting: bool = False
    ) -> Recording:
        """Record a function, which must have run before with the same sizes.

        Args:
            function: Does the work.
            device: Where it does it.
            lasting: Whether its output has to outlast replays of other recordings.

        Returns:
            The recording. Its output holds nothing before the first replay.

        Raises:
            CaptureError: It cannot be recorded.
            torch.OutOfMemoryError: There is no room for its activations.
        """

    @abstractmethod
    def forget(self) -> None:
        """Never record into the memory of earlier recordings again; none may be replayed again.

        It goes back to the GPU with the next recording, or with `release_memory`.
        """

    @abstractmethod
    def release_memory(self) -> None:
        """Give the memory of recordings that nobody holds any more back to the GPU at once."""


class CudaRecorder(Recorder):
    """Records CUDA graphs. Those of one device share a memory pool, except `lasting` ones.

    In a shared pool a replay overwrites what was recorded after it, so callers copy outputs at
    once. In return, more sizes take hardly more memory.

    Each device has a stream of its own to record on. Recordings of a shared pool have to come from
    one stream.
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}
        self._recordings: WeakSet[_CudaRecording] = WeakSet()  # those that somebody holds
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def unavailable_reason(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "CUDA graphs need a CUDA device"
        if torch.cuda.is_current_stream_capturing():
            return "another CUDA graph is being recorded"
        return None

    def stopwatch(self, device: torch.device) -> Stop:
        return stopwatch(device)

    def record(
        self, function: Callable[[], Any], device: torch.device, lasting: bool = False
    ) -> Recording:
        with torch.cuda.device(device):
            pool = torch.cuda.graph_pool_handle() if lasting else self._shared_pool(device)
            _make_room(device)
            before = torch.cuda.memory_reserved(device)
            graph = torch.cuda.CUDAGraph()
            try:
                with _capture(graph, pool, self._stream(device)):
                    output = function()
            except OutOfMemoryError:
                self._abandon(device, pool)
                raise
            except Exception as exc:  # CUDA and torch raise various types here
                self._abandon(device, pool)
                lines = [line for line in str(exc).splitlines() if line.strip()]
                raise CaptureError(lines[0] if lines else type(exc).__name__) from exc
            size_bytes = max(0, torch.cuda.memory_reserved(device) - before)
        made = _CudaRecording(graph, output, size_bytes, pool)
        self._recordings.add(made)
        return made

    def _shared_pool(self, device: torch.device) -> Any:
        """The pool of a device's recordings; a new one where none of them is left.

        CUDA cannot record again into a pool whose graphs are all gone. That happens while another
        device still has recordings, so that nobody calls `forget`: a model has moved there.
        """
        pool = self._pools.get(device)
        if pool is None or not any(each.pool == pool for each in self._recordings):
            pool = self._pools[device] = torch.cuda.graph_pool_handle()
        return pool

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream to record on: one for each device, since recordings share a pool."""
        if device not in self._streams:
            make_stream: Any = torch.cuda.Stream  # not typed
            self._streams[device] = make_stream(device)
        return self._streams[device]

    def _abandon(self, device: torch.device, pool: Any) -> None:
        """Leave the pool of a recording that failed: the allocator still records into it.

        Earlier CUDA graphs in this pool stay alive and valid.
        """
        if self._pools.get(device) == pool:
            del self._pools[device]
        index = device.index if device.index is not None else torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):
            end_recording_to_pool(index, pool)

    def forget(self) -> None:
        self._pools.clear()

    def release_memory(self) -> None:
        if self._recordings:
            gc.collect()  # half a second in a large process
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use


def _make_room(device: torch.device) -> None:
    """Give unused memory back to the GPU before a recording, unless there is more than it needs.

    While a graph is recorded, memory that the allocator keeps for others cannot be used. The
    function has just run, so its activations fit into what the allocator keeps. Giving that back
    waits until the GPU has ended all work, and the next forward in Python has to ask for it again.
    """
    free_bytes, _ = torch.cuda.mem_get_info(device)
    kept_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free_bytes < _ROOMY * kept_bytes:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _capture(graph: Any, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record what is called, as `torch.cuda.graph` does.

    That one also gives all pinned memory back which torch keeps and a host may use again, and older
    ones collect garbage.
    """
    with torch.cuda.stream(stream):
        # Other threads (a preview, a loader) may go on calling CUDA meanwhile.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class _CudaRecording(Recording):
    def __init__(self, graph: Any, output: Any, size_bytes: int, pool: Any) -> None:
        self._graph, self.output, self.size_bytes = graph, output, size_bytes
        self.pool = pool

    def replay(self) -> None:
        self._graph.replay()

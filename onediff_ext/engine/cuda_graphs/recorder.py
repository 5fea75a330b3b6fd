"""Recording a function's GPU work, to be replayed without Python."""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from onediff_ext.core.errors import CaptureError
from onediff_ext.engine.torch_versions import OutOfMemoryError, end_recording_to_pool


class Recording(ABC):
    """The recorded work of one call."""

    output: Any
    size_bytes: int

    @abstractmethod
    def replay(self) -> None:
        """Do the work again; the tensors in `output` are written anew."""


class Recorder(ABC):
    """Makes recordings on one kind of device."""

    @abstractmethod
    def unavailable_reason(self, device: torch.device) -> str | None:
        """Why nothing can be recorded for this device, or None."""

    @abstractmethod
    def record(
        self, function: Callable[[], Any], device: torch.device, lasting: bool = False
    ) -> Recording:
        """Record what `function` does; it must have run before with the same sizes.

        Args:
            function: Does the work.
            device: Where.
            lasting: Whether what it gives has to outlast replays of other recordings.

        Raises:
            CaptureError: It cannot be recorded.
            torch.OutOfMemoryError: There is no room for its activations.
        """

    @abstractmethod
    def forget(self) -> None:
        """Give back the memory of all recordings; none of them may be replayed again."""


class CudaRecorder(Recorder):
    """CUDA graphs, all of one device in one memory pool, but for those that are `lasting`.

    Sharing a pool means that a replay overwrites whatever was recorded after it, so outputs are
    copied at once; in return more sizes need hardly more memory.
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}

    def unavailable_reason(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "captures need a CUDA device"
        if torch.cuda.is_current_stream_capturing():
            return "somebody else is capturing"
        return None

    def record(
        self, function: Callable[[], Any], device: torch.device, lasting: bool = False
    ) -> Recording:
        # A recording that fails leaves its own stream behind as the current one.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            pool = None if lasting else self._pools.get(device)
            if pool is None:
                pool = torch.cuda.graph_pool_handle()
            if not lasting:
                self._pools[device] = pool
            before = torch.cuda.memory_reserved(device)
            graph = torch.cuda.CUDAGraph()
            # Other threads (a preview, a loader) may go on calling CUDA meanwhile.
            recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
            try:
                with recording:
                    output = function()
            except OutOfMemoryError:
                self._abandon(device, pool)
                raise
            except Exception as exc:  # CUDA and torch raise various types here
                self._abandon(device, pool)
                lines = [line for line in str(exc).splitlines() if line.strip()]
                raise CaptureError(lines[0] if lines else type(exc).__name__) from exc
            size_bytes = max(0, torch.cuda.memory_reserved(device) - before)
        return _CudaRecording(graph, output, size_bytes)

    def _abandon(self, device: torch.device, pool: Any) -> None:
        """Leave the pool of a recording that failed, which the allocator keeps on recording to.

        Captures made in it before stay alive and right.
        """
        if self._pools.get(device) == pool:
            del self._pools[device]
        index = device.index if device.index is not None else torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):
            end_recording_to_pool(index, pool)

    def forget(self) -> None:
        # A pool without any graph alive cannot be captured into again: the next is a new one.
        self._pools.clear()
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use


class _CudaRecording(Recording):
    def __init__(self, graph: Any, output: Any, size_bytes: int) -> None:
        self._graph, self.output, self.size_bytes = graph, output, size_bytes

    def replay(self) -> None:
        self._graph.replay()

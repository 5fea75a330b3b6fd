"""CUDA's devices and streams as the recorder sees them, on several GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest
import torch


class FakeStream:
    """A stream; like torch's it lies on the current device unless another is given."""

    cuda: FakeCuda

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = self.cuda.current if device is None else device


class FakeGraph:
    """A CUDA graph: it holds what is launched on the stream that is current at its beginning.

    Attributes:
        stream: That stream.
        launched: How often something was launched on it.
        is_invalid: Whether something happened that ends a recording, which torch finds at its end:
            the recording's end raises then.
    """

    cuda: FakeCuda

    def capture_begin(self, pool: object, **_: Any) -> None:
        alive = self.cuda.pools.get(pool)
        if alive is not None and not alive:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.cuda.pools.setdefault(pool, WeakSet()).add(self)
        self.stream, self.launched, self.is_invalid = self.cuda.stream_of(), 0, False
        self.cuda.recording = self

    def capture_end(self) -> None:
        self.cuda.recording = None
        if self.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        pass


class _OnStream:
    """Makes a stream current, and its device."""

    def __init__(self, cuda: FakeCuda, stream: FakeStream) -> None:
        self._cuda, self._stream = cuda, stream

    def __enter__(self) -> None:
        cuda, device = self._cuda, self._stream.device
        self._before = cuda.current, cuda.streams[device]
        cuda.current, cuda.streams[device] = device, self._stream

    def __exit__(self, *_: object) -> None:
        self._cuda.current, self._cuda.streams[self._stream.device] = self._before


class FakeCuda:
    """Replaces what the recorder calls.

    Args:
        monkeypatch: Puts torch's own back.

    Attributes:
        current: The current device.
        recording: The graph that is being recorded.
        graphs: All graphs.
        pools: By handle, the graphs of a memory pool that are alive. Once they are all gone, torch
            records into this pool no more.
        streams: The current stream of each device.
        free_bytes: Memory that no process uses.
        kept_bytes: Memory that torch keeps though no tensor uses it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes, self.kept_bytes = 2**30, 0
        self.current = torch.device("cuda:0")
        self.recording: FakeGraph | None = None
        self.graphs: list[FakeGraph] = []
        self.pools: dict[object, WeakSet[FakeGraph]] = {}
        stream = type("Stream", (FakeStream,), {"cuda": self})
        self.streams = {torch.device("cuda", i): stream(torch.device("cuda", i)) for i in (0, 1)}
        graph = type("Graph", (FakeGraph,), {"cuda": self})

        def made() -> FakeGraph:
            self.graphs.append(graph())
            return self.graphs[-1]

        replaced = {
            "Stream": stream,
            "CUDAGraph": made,
            "device": self._on_device,
            "stream": lambda stream: _OnStream(self, stream),
            "current_stream": self.stream_of,
            "graph_pool_handle": object,
            "mem_get_info": lambda _: (self.free_bytes, 2 * self.free_bytes),
            "memory_reserved": lambda _: self.kept_bytes,
            "memory_allocated": lambda _: 0,
            "synchronize": lambda: None,
            "empty_cache": self._empty_cache,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def stream_of(self, device: torch.device | None = None) -> FakeStream:
        """Return the current stream of a device; None is the current device."""
        return self.streams[self.current if device is None else device]

    def launch(self, device: torch.device) -> None:
        """Launch work of a device's tensors: on that device's current stream."""
        if self.recording is not None and self.stream_of(device) is self.recording.stream:
            self.recording.launched += 1

    @contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def _empty_cache(self) -> None:
        self.free_bytes, self.kept_bytes = self.free_bytes + self.kept_bytes, 0

    def wait(self) -> None:
        """Wait for the GPU, which ends a recording."""
        assert self.recording is not None
        self.recording.is_invalid = True
        raise RuntimeError("operation not permitted when stream is capturing")

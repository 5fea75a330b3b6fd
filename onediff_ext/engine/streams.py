"""Keeps GPU work that shares memory in order across CUDA streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StreamOrder:
    """Runs pieces of GPU work one after the other.

    A lock orders launches only: two threads with streams of their own would still use the same
    memory at the same time. Here each piece waits on the GPU for the piece before it, where that
    ran on another stream. The CPU does not wait.
    """

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    @contextmanager
    def after_the_last(self, device: torch.device) -> Iterator[None]:
        """Run the work that is launched within the ``with`` block after the last piece.

        Args:
            device: Where it runs. Only CUDA devices have streams; elsewhere nothing is done.
        """
        if device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(device)
        self.wait(device, stream)
        try:
            yield
        finally:
            self.mark(device, stream)

    def wait(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Make work that is launched from now on wait for the last piece.

        Args:
            device: Where it runs; only CUDA devices have streams.
            stream: Its stream; None is the current one.
        """
        if device.type != "cuda" or device not in self._last:
            return
        stream = torch.cuda.current_stream(device) if stream is None else stream
        last, event = self._last[device]
        if last != stream:
            stream.wait_event(event)

    def mark(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Make the work that was launched until now the last piece.

        Args:
            device: Where it runs; only CUDA devices have streams.
            stream: Its stream; None is the current one.
        """
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device) if stream is None else stream
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        self._last[device] = (stream, event)

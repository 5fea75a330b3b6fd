"""Work on a GPU that shares memory has to happen in order, on whichever streams it is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StreamOrder:
    """Puts pieces of GPU work one behind the other.

    A lock orders launches only: two threads with streams of their own would use the same memory at
    the same time. Each piece waits, on the GPU, for the one before it if that ran on another
    stream; the processor waits for nothing.
    """

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    @contextmanager
    def after_the_last(self, device: torch.device) -> Iterator[None]:
        """Order the work that is launched within the ``with`` block."""
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
        """Have what is launched from now on wait for the last piece."""
        if device.type != "cuda" or device not in self._last:
            return
        stream = torch.cuda.current_stream(device) if stream is None else stream
        last, event = self._last[device]
        if last != stream:
            stream.wait_event(event)

    def mark(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """What was launched until now is the last piece."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device) if stream is None else stream
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        self._last[device] = (stream, event)

"""Copies of weights in main memory that a CUDA graph makes while the block before them runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ALIGNMENT = 256


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


class CopiesAhead:
    """Copies the weights of one block after the other on a second stream, during a recording.

    Two buffers take turns. A block's copies begin when the GPU comes to the block before it: then
    the block before that one, which read the same buffer, has ended. So the bus is busy while the
    GPU computes. Without a recording there is nothing to gain: Python does not know in time which
    block comes next, and a recording does not have to.

    Args:
        device: A GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = _side_stream(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._last_block: torch.cuda.Event | None = None

    def copy(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the weights of the next block.

        Args:
            weights: Dense tensors in pinned memory.

        Returns:
            The copies, with the same strides. The next call but one writes to the same buffer, so
            only the block may read them.

        Raises:
            torch.OutOfMemoryError: There is no memory for a buffer.
        """
        offsets, size_bytes = [], 0
        for weight in weights:
            offsets.append(size_bytes)
            size_bytes += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
        main = torch.cuda.current_stream(self._device)
        this_block = main.record_event()
        start = self._last_block or this_block
        buffer, other = self._buffers
        if buffer.numel() < size_bytes:
            # The block before may use this memory for its activations.
            buffer, start = (
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device),
                this_block,
            )
        self._buffers, self._last_block = [other, buffer], this_block
        copies = [
            buffer[offset : offset + weight.nbytes]
            .view(weight.dtype)
            .as_strided(weight.shape, weight.stride())
            for weight, offset in zip(weights, offsets, strict=True)
        ]
        self._side.wait_event(start)
        with torch.cuda.stream(self._side):
            for copied, weight in zip(copies, weights, strict=True):
                copied.copy_(weight, non_blocking=True)
        main.wait_event(self._side.record_event())
        return copies


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream of a device: torch has few streams, and hands them out in turn."""
    main = torch.cuda.current_stream(device)
    if _side_streams.get(device, main) == main:
        make_stream: Any = torch.cuda.Stream  # not typed
        _side_streams[device] = make_stream(device)
    return _side_streams[device]

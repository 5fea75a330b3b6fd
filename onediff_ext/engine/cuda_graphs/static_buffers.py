"""Static buffers: the fixed memory that recordings read inputs from and write outputs to."""

from __future__ import annotations

import torch


class StaticBuffers:
    """One buffer for each position of a tensor in a call, shared by all recordings of a device.

    Inputs are copied in right before a replay and outputs are copied out right after it, so any
    number of recordings takes no more memory than the largest of them.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], torch.Tensor] = {}

    def take(self, index: int, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor in the buffer of one position. The buffer may grow for it.

        Must not be called while a recording is made, or the buffer would lie in its memory pool.

        Args:
            index: The position of the tensor; inputs come first, then outputs.
            like: Has the wanted shape, strides and dtype.
            device: Where the buffer lies.

        Returns:
            A tensor with the contents that the buffer has now.
        """
        strides = torch.empty_like(like, device="meta").stride()
        buffer = self._buffers.get((device, index))
        needed = like.numel() * like.element_size()
        with torch.inference_mode(False):  # or it could not be written to outside of it
            if buffer is None or buffer.numel() < needed:
                # Twice the last one: recordings keep the buffers that they were made with.
                size = max(needed, 2 * buffer.numel() if buffer is not None else 0)
                size = (size // 16 + 1) * 16  # aligned for any dtype
                buffer = torch.empty(size, dtype=torch.uint8, device=device)
                self._buffers[device, index] = buffer
            return buffer.view(like.dtype).as_strided(like.shape, strides)

    @property
    def size_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def release(self) -> None:
        """Release the memory, once no recording needs it."""
        self._buffers.clear()

"""How much memory a VAE needs for a picture, and how much there is."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from onediff_ext.hosts.diffusers.compile import compiled_state

# Libraries' workspaces and copies between layouts, on top of the activations.
_BESIDES = 1.3


def needed_bytes(
    part: str, channels: Sequence[int], pictures: int, pixels: int, dtype: torch.dtype
) -> int:
    """Most memory that activations take while pictures are encoded or decoded.

    Args:
        part: "encoder" or "decoder".
        channels: The VAE's ``block_out_channels``, full resolution first.
        pictures: At the same time.
        pixels: Of each.
        dtype: Of the activations.

    The peak is at full resolution. A decoder's first residual block there still has the
    channels of the level below: its input, that input's norm, and the norm's SiLU. In a block of
    full resolution's own channels: the input of the level and of the block, the block's result,
    their sum and its scaling. Counted on both full-size VAEs, operator by operator, in
    tests/hosts/diffusers/test_vae_memory.py; attention takes nothing beside it where it is fused.
    """
    values = 5 * channels[0]
    if part == "decoder" and len(channels) > 1:
        values = max(values, 3 * channels[1])
    return int(_BESIDES * values * pixels * pictures * dtype.itemsize)


class DeviceMemory:
    """What is left on a device, and what can be given up for a VAE.

    Args:
        pipe: Its captures' pool counts as taken until it is given up.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def free_bytes(self, device: torch.device) -> int | None:
        """What can be allocated now, or None where that is not known (CPU)."""
        if device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + max(0, unused - self.bytes_of_captures())

    def bytes_of_captures(self) -> int:
        """What CUDA graphs hold, which can be made again."""
        state = compiled_state(self._pipe)
        return 0 if state is None else state.session.captures.size_bytes

    def give_up_captures(self) -> None:
        """Drop CUDA graphs for their memory."""
        state = compiled_state(self._pipe)
        if state is not None:
            state.session.captures.drop_all("the VAE needs their memory")

    def free_caches(self) -> None:
        """After something did not fit: give back whatever only waits to be used again."""
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use

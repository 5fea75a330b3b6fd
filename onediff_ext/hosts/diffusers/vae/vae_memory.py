"""How much memory a VAE needs for a picture, and how much is free."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compiled_state

# Factor for libraries' workspaces and copies between layouts, on top of the activations.
_BESIDES = 1.3


def needed_bytes(
    part: str, channels: Sequence[int], pictures: int, pixels: int, dtype: torch.dtype
) -> int:
    """Return the peak memory of activations while pictures are encoded or decoded, in bytes.

    The peak is at full resolution. A decoder's first residual block there still has the channels
    of the level below: its input, the norm of the input, and the norm's SiLU. A block with full
    resolution's own channels holds the input of the level and of the block, the block's result,
    their sum and its scaling. tests/hosts/diffusers/test_vae_memory.py counts both full-size VAEs
    operator by operator. Fused attention adds nothing to the peak.

    Args:
        part: "encoder" or "decoder".
        channels: The VAE's ``block_out_channels``, full resolution first.
        pictures: Pictures at the same time.
        pixels: Pixels of each picture.
        dtype: Of the activations.
    """
    values = 5 * channels[0]
    if part == "decoder" and len(channels) > 1:
        values = max(values, 3 * channels[1])
    return int(_BESIDES * values * pixels * pictures * dtype.itemsize)


class DeviceMemory:
    """Free memory of a device, and memory that a VAE can take from CUDA graphs.

    Args:
        pipe: The pool of its CUDA graphs counts as taken until it is dropped.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    @property
    def _cuda_graphs(self) -> CudaGraphCache | None:
        state = compiled_state(self._pipe)
        return None if state is None else state.session.cuda_graphs

    def free_bytes(self, device: torch.device) -> int | None:
        """Return the bytes that can be allocated now, or None if unknown (CPU)."""
        if device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        graphs = self._cuda_graphs
        return int(free) + max(0, unused - (0 if graphs is None else graphs.size_bytes))

    def cuda_graph_bytes(self) -> int:
        """Return the bytes that CUDA graphs hold; they can be recorded again."""
        graphs = self._cuda_graphs
        return 0 if graphs is None else graphs.size_bytes + graphs.kept_bytes

    def drop_cuda_graphs(self) -> None:
        """Drop all CUDA graphs to free their memory."""
        graphs = self._cuda_graphs
        if graphs is not None:
            graphs.drop_all("the VAE needs their memory")

    def free_caches(self) -> None:
        """Free unused cached memory after an allocation failed."""
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use

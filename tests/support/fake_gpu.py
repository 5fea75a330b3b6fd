"""A GPU of a chosen size, for the tests of who may hold how much of it."""

from __future__ import annotations

import torch

from onediff_ext.engine.memory_budget import GpuMemory, MemoryReading

GB, MB = 2**30, 2**20
DEVICE = torch.device("cpu")
"""Where the tests' models are."""


class FakeGpu(GpuMemory):
    """Memory by its owners, as torch's allocator counts it.

    Args:
        total_bytes: Of the device.

    Attributes:
        tensors: In use by tensors.
        pools: Reserved for CUDA graphs.
        cached: Reserved by torch and unused, besides `pools`.
        others: Taken by other processes.
        released: How often torch gave back what it had cached.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.tensors = self.pools = self.cached = self.others = 0
        self.peak = self.released = 0

    def read(self, device: torch.device) -> MemoryReading:
        self.peak = max(self.peak, self.tensors)
        reserved = self.tensors + self.pools + self.cached
        free = self.total_bytes - self.others - reserved
        return MemoryReading(self.total_bytes, free, reserved, self.tensors, self.peak)

    def release_cached(self) -> None:
        self.released += 1
        self.cached = 0

    def use(self, tensor_bytes: int) -> None:
        """Let tensors come to this size and go back to what they were."""
        before, self.tensors = self.tensors, tensor_bytes
        self.read(DEVICE)
        self.tensors = before

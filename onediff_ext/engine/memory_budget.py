"""The memory budget: how much of a GPU's memory CUDA graphs may hold, and when it is given back.

What fits without CUDA graphs has to fit with them. A graph's pool is memory that nothing else can
use, although torch counts it as unused. So the budget follows two rules:

- **While a denoiser runs**, CUDA graphs may take what is free then, up to a limit. Its own forwards
  need no more than they needed at the first, eager step, and give graphs up when memory runs out.
- **Afterwards**, CUDA graphs stay only in memory that no picture has needed so far: text encoders,
  the VAE, an upscaler and the host's moves of weights find what they found before.
"""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onediff_ext.core.gpu_advice import CUDA_GRAPHS_PART

# Free memory that a recording has to leave: previews and libraries' workspaces.
MARGIN_BYTES = 256 * 2**20
_UNLIMITED = 2**62


@dataclass(frozen=True)
class MemoryReading:
    """The memory of a GPU at one moment, in bytes.

    Args:
        total: Of the device.
        free: Unused by any process.
        reserved: Taken by this process's torch, in use or cached, with the pools of CUDA graphs.
        allocated: In use by tensors.
        peak: The most that tensors have used, since the process began or somebody reset it.
    """

    total: int
    free: int
    reserved: int
    allocated: int
    peak: int


class DerivedWeights(ABC):
    """Weights that were computed from a model's own: with LoRAs merged, or in 8 bits."""

    @abstractmethod
    def derived_bytes(self) -> int:
        """Return their memory."""

    @abstractmethod
    def lie_elsewhere(self) -> bool:
        """Return whether they lie on another device than the weights that they are made from.

        A host has moved the model meanwhile, to have the memory for another one.
        """

    @abstractmethod
    def release(self) -> None:
        """Free them; the next call computes them again.

        CUDA graphs that read them keep them: drop those first.
        """


class GpuMemory(ABC):
    """Reads a device's memory; the port between the budget and torch."""

    @abstractmethod
    def read(self, device: torch.device) -> MemoryReading | None:
        """Return the memory now, or None for a device without memory of its own (CPU).

        Args:
            device: Any device of torch.
        """

    @abstractmethod
    def release_cached(self) -> None:
        """Give memory that torch caches back to the driver."""


class TorchGpuMemory(GpuMemory):
    """The memory of CUDA devices, as torch and the driver report it."""

    def read(self, device: torch.device) -> MemoryReading | None:
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        return MemoryReading(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(device),
            allocated=torch.cuda.memory_allocated(device),
            peak=torch.cuda.max_memory_allocated(device),
        )

    def release_cached(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use


class MemoryBudget:
    """Decides how much memory the CUDA graphs of a session may hold.

    Args:
        gpu: Reads the memory.
        limit_bytes: Most memory for CUDA graphs; None is a quarter of the device's.

    Attributes:
        derived: What may hold derived weights, of all blocks.
    """

    def __init__(self, gpu: GpuMemory | None = None, limit_bytes: int | None = None) -> None:
        self._gpu, self._limit_bytes = gpu or TorchGpuMemory(), limit_bytes
        self._peaks: dict[torch.device, int] = {}
        self.derived: weakref.WeakSet[DerivedWeights] = weakref.WeakSet()
        self._ran_out: set[torch.device] = set()
        self._pool_bytes: weakref.WeakMethod[Callable[[torch.device], int]] | None = None

    def free_bytes(self, device: torch.device, pool_bytes: int) -> int | None:
        """Return what tensors could be allocated now, in bytes; None for a CPU.

        Args:
            device: The GPU.
            pool_bytes: Held by the pools of CUDA graphs, which torch counts as unused.
        """
        reading = self._read(device)
        return None if reading is None else self._free(reading, pool_bytes)

    def note_pools(self, size_on: Callable[[torch.device], int]) -> None:
        """Remember who knows the size of CUDA graphs' pools.

        Args:
            size_on: A bound method that returns it for a device, in bytes.
        """
        self._pool_bytes = weakref.WeakMethod(size_on)

    def free_beside_pools(self, device: torch.device) -> int | None:
        """Return what tensors could be allocated while all CUDA graphs stay, in bytes.

        Args:
            device: The GPU. None is returned for a CPU.
        """
        size_on = self._pool_bytes() if self._pool_bytes else None
        return self.free_bytes(device, size_on(device) if size_on else 0)

    def allowed_bytes(self, device: torch.device, pool_bytes: int, kept_bytes: int = 0) -> int:
        """Return how much CUDA graphs may hold while a denoiser runs, in bytes.

        Args:
            device: The GPU.
            pool_bytes: What their pools hold.
            kept_bytes: Tensors that they keep, which torch counts as used.
        """
        reading = self._read(device)
        if reading is None:
            return _UNLIMITED if self._limit_bytes is None else self._limit_bytes
        limit = self._limit_bytes
        if limit is None:
            limit = reading.total // CUDA_GRAPHS_PART
        held_bytes = pool_bytes + kept_bytes
        return min(limit, held_bytes + self._free(reading, pool_bytes) - MARGIN_BYTES)

    def must_give_back(self, device: torch.device, held_bytes: int) -> bool:
        """Whether CUDA graphs hold memory that a picture has needed before.

        Args:
            device: The GPU.
            held_bytes: What they hold, in pools and in tensors that they keep. Where these were a
                part of what the picture needed, they count twice: memory is given back early.
        """
        reading = self._read(device)
        if reading is None or not held_bytes:
            return False
        if device in self._ran_out:
            return True
        return reading.free + reading.reserved - held_bytes < self._peaks[device]

    def note_ran_out(self, device: torch.device) -> None:
        """Leave all memory of a device to others: it ran out where nothing could be repeated.

        Args:
            device: The GPU.
        """
        self._ran_out.add(device)

    def derived_bytes(self) -> int:
        """Return the memory of all derived weights."""
        return sum(each.derived_bytes() for each in list(self.derived))

    def release_derived(self, *, elsewhere_only: bool = False) -> bool:
        """Free derived weights.

        Args:
            elsewhere_only: Only those whose model a host has moved to another device.

        Returns:
            Whether there were any.
        """
        freed = False
        for each in list(self.derived):
            if each.derived_bytes() and (not elsewhere_only or each.lie_elsewhere()):
                each.release()
                freed = True
        return freed

    def release_cached(self) -> None:
        """Give memory that torch caches back to the driver."""
        self._gpu.release_cached()

    def _read(self, device: torch.device) -> MemoryReading | None:
        reading = self._gpu.read(device)
        if reading is not None:  # hosts reset torch's own peak
            self._peaks[device] = max(self._peaks.get(device, 0), reading.peak)
        return reading

    def _free(self, reading: MemoryReading, pool_bytes: int) -> int:
        unused = reading.reserved - reading.allocated - pool_bytes
        return reading.free + max(0, unused)

"""Pinned main memory for weights, in chunks that are used again.

torch has an allocator of pinned memory, too. It has each tensor made by the driver, page by page,
and rounds it up to a power of two. Memory that all threads have written to before is pinned faster.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Main memory that has to stay free beside pinned weights, which cannot be swapped out.
SPARE_BYTES = 3 * 2**30

# So long one move may pin memory; what is left then moves as it would by itself.
PINNING_LIMIT_S = 0.4

# What is pinned at a time. A larger tensor gets a chunk of its own.
CHUNK_BYTES = 2**28

# Tensors in a chunk begin at multiples of it, as those that torch makes in main memory do.
ALIGNMENT = 64


class PinnedMemory:
    """Makes tensors in pinned memory. Each has a storage of its own, which cannot be resized.

    A chunk whose last tensor dies within a move stays pinned for the next tensors. Otherwise its
    model was deleted, and it goes back to the system. Once main memory is short, nothing more is
    pinned, and chunks go back as soon as they are empty.

    Args:
        available_bytes: Returns how much main memory can be used without swapping.
    """

    def __init__(self, available_bytes: Callable[[], int] | None = None) -> None:
        self._available_bytes = available_bytes or main_memory_available
        self._lock = threading.Lock()
        self._chunks: list[_Chunk] = []
        self._filling: _Chunk | None = None
        self._devices: set[torch.device] = set()  # which may still read chunks
        self._moves = 0  # of all threads
        self._pinning_s = 0.0  # since the last one began
        self._is_off = False
        atexit.register(self.begin_move)  # at the end of the process, nothing is given back

    def begin_move(self) -> None:
        """Keep chunks from now on. For up to `PINNING_LIMIT_S`, more may be pinned."""
        with self._lock:
            self._moves += 1
            self._pinning_s = 0.0
            if self._chunks and not self._is_off and self._available_bytes() < SPARE_BYTES // 2:
                self._turn_off("main memory is short")

    def end_move(self) -> None:
        """Note that a move has ended."""
        with self._lock:
            self._moves -= 1
            if self._is_off:
                self._give_back(self._chunks)

    def copy(
        self, tensor: torch.Tensor, device: torch.device, non_blocking: bool = False
    ) -> torch.Tensor | None:
        """Copy a tensor to pinned memory.

        Args:
            tensor: A strided one with at least one element.
            device: The GPU that writes to the copy, or is going to read it.
            non_blocking: Whether a GPU may still write to the copy on return.

        Returns:
            The copy, with the strides that ``tensor.to("cpu")`` would have; None if there is no
            pinned memory for it now.
        """
        is_dense = tensor.is_contiguous()  # what most are; all strides are found more slowly
        stride = (tensor if is_dense else torch.empty_like(tensor, device="meta")).stride()
        with self._lock:
            self._devices.add(device)
            chunk = self._chunk_for(tensor.nbytes)
            if chunk is None:
                return None
            piece = chunk.take(tensor.nbytes)
        copied = torch.frombuffer(piece, dtype=tensor.dtype).as_strided_(tensor.shape, stride)
        return copied.copy_(tensor, non_blocking=non_blocking)

    def _chunk_for(self, size_bytes: int) -> _Chunk | None:
        if self._filling is not None and self._filling.has_room_for(size_bytes):
            return self._filling
        self._filling = None
        if self._is_off:
            return None
        if idle := [
            chunk for chunk in self._chunks if chunk.is_empty and size_bytes <= chunk.size_bytes
        ]:
            self._filling = min(idle, key=lambda chunk: chunk.size_bytes)
            self._wait()
            self._filling.begin()
        elif self._pinning_s < PINNING_LIMIT_S:
            self._filling = self._pin(max(CHUNK_BYTES, size_bytes))
        return self._filling

    def _pin(self, size_bytes: int) -> _Chunk | None:
        start_s = time.perf_counter()
        if self._available_bytes() - size_bytes < SPARE_BYTES:
            self._turn_off("main memory is short")
            return None
        try:
            chunk = _Chunk(size_bytes, self._is_empty)
        except (OSError, RuntimeError) as error:
            self._turn_off(str(error).partition("\n")[0])
            return None
        self._chunks.append(chunk)
        self._pinning_s += time.perf_counter() - start_s
        return chunk

    def _turn_off(self, reason: str) -> None:
        self._is_off = True
        logger.warning("Models are moved without pinned memory from now on: %s", reason)
        self._give_back(self._chunks)

    def _is_empty(self, chunk: _Chunk) -> None:
        # The garbage collector may call this within any function, so also with the lock held.
        if self._moves == 0 and self._lock.acquire(blocking=False):
            try:
                self._give_back([chunk])
            finally:
                self._lock.release()

    def _give_back(self, chunks: list[_Chunk]) -> None:
        for chunk in [chunk for chunk in chunks if chunk.is_empty and chunk in self._chunks]:
            if torch.cuda.is_current_stream_capturing():
                return
            try:
                self._wait()
                chunk.unpin()
            except RuntimeError as error:
                logger.warning("Pinned memory is kept: %s", str(error).partition("\n")[0])
                return
            self._chunks.remove(chunk)
            if self._filling is chunk:
                self._filling = None

    def _wait(self) -> None:
        """Wait until GPUs have read what was in chunks that are empty now."""
        for device in self._devices:
            torch.cuda.synchronize(device)


class _Chunk:
    """Pinned memory that is handed out from its beginning to its end."""

    def __init__(self, size_bytes: int, on_empty: Callable[[_Chunk], None]) -> None:
        pages = -(-size_bytes // mmap.PAGESIZE)
        self.size_bytes = pages * mmap.PAGESIZE
        self._memory = memoryview(mmap.mmap(-1, self.size_bytes))
        self._used_bytes = 0
        self._pieces: dict[int, weakref.ref[memoryview]] = {}  # those in use
        self._on_empty = on_empty
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        whole.zero_()  # by all threads; the driver would make the pages by one
        self._address = whole.data_ptr()
        _call_cuda("cudaHostRegister", self._address, self.size_bytes, 0)

    @property
    def is_empty(self) -> bool:
        """Whether no tensor is in it."""
        return not self._pieces

    def has_room_for(self, size_bytes: int) -> bool:
        """Return whether so much is left."""
        return self._used_bytes + size_bytes <= self.size_bytes

    def begin(self) -> None:
        """Hand out its memory from the beginning."""
        self._used_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """Hand out the next piece. It is in use while anything refers to it."""
        piece = self._memory[self._used_bytes : self._used_bytes + size_bytes]
        self._used_bytes += -(-size_bytes // ALIGNMENT) * ALIGNMENT
        reference = weakref.ref(piece, self._has_died)
        self._pieces[id(reference)] = reference
        return piece

    def _has_died(self, reference: weakref.ref[memoryview]) -> None:
        del self._pieces[id(reference)]
        if not self._pieces:
            self._on_empty(self)

    def unpin(self) -> None:
        """Make ordinary memory of it, once no GPU uses it."""
        _call_cuda("cudaHostUnregister", self._address)


def _call_cuda(name: str, *arguments: int) -> None:
    """Call a function of the CUDA runtime.

    Raises:
        RuntimeError: It returned an error.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(int(getattr(runtime, name)(*arguments)))
    except RuntimeError:
        # CUDA remembers the error until somebody asks for it, as torch does behind each launch.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(0)
        raise


def main_memory_available() -> int:
    """Return the bytes of main memory that can be used without swapping; 0 if nothing tells."""
    try:
        import psutil  # a dependency of the hosts that move models
    except ImportError:
        return 0
    return int(psutil.virtual_memory().available)


# Of this process: what one model leaves is used for the next.
PINNED_MEMORY = PinnedMemory()

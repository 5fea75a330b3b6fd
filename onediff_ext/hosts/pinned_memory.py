"""Pinned main memory for weights, in chunks that are used again.

torch has an allocator of pinned memory, too. It has each tensor made by the driver, page by page,
and rounds it up to a power of two. Here all threads write to ordinary memory, which is pinned then.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onediff_ext.hosts.main_memory import main_memory_available

logger = logging.getLogger(__name__)

# Main memory that has to stay free beside pinned weights, which cannot be swapped out.
SPARE_BYTES = 3 * 2**30

# So long one move may pin memory; what is left then moves as it would by itself.
PINNING_LIMIT_S = 0.4

# What is pinned at a time. A tensor that would leave much of it unused gets a chunk of its own.
CHUNK_BYTES = 2**28
_OWN_CHUNK_PART = 8  # from an eighth of a chunk on

# Tensors in a chunk begin at multiples of it, as those that torch makes in main memory do.
ALIGNMENT = 64

_SHORT = "main memory is short"


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
        # Garbage may be collected with the lock held, and then move a model or delete one.
        self._lock, self._is_busy = threading.RLock(), False
        self._chunks: list[_Chunk] = []
        self._filling: _Chunk | None = None
        self._moves = 0  # of all threads
        self._pinning_s = 0.0  # since the last one began
        self._is_off = False
        atexit.register(self._keep_all)

    def begin_move(self) -> None:
        """Keep chunks from now on. For up to `PINNING_LIMIT_S`, more may be pinned."""
        with self._lock:
            self._moves += 1
            self._pinning_s = 0.0
        with self._alone() as alone:
            if alone and self._chunks and self._available_bytes() < SPARE_BYTES // 2:
                self._turn_off(_SHORT)

    def _keep_all(self) -> None:
        """Give nothing back at the end of the process: the driver may have gone by then."""
        self._moves += 2  # as while several threads move models

    def end_move(self) -> None:
        """Note that a move has ended."""
        with self._lock:
            self._moves -= 1
        with self._alone() as alone:
            if alone and self._is_off:
                self._give_back(self._chunks)

    def settle(self) -> None:
        """Turn it off if the host could miss what empty chunks hold. Call it between pictures.

        A host may move a model out by itself then, and read another one.
        """
        with self._alone() as alone:
            if alone and not self._is_off:
                empty_bytes = sum(chunk.size_bytes for chunk in self._chunks if chunk.is_empty)
                if empty_bytes and self._available_bytes() < SPARE_BYTES + 2 * empty_bytes:
                    self._turn_off(_SHORT)

    def give_back(self) -> None:
        """Give all empty chunks back to the system: no more moves are to come soon."""
        with self._alone() as alone:
            if alone:
                self._give_back(self._chunks)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor in main memory lies in a chunk.

        Args:
            tensor: A strided one.
        """
        address = tensor.data_ptr()
        return any(chunk.address <= address < chunk.end for chunk in tuple(self._chunks))

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
        with self._alone() as alone:
            chunk = self._chunk_for(tensor.nbytes, device) if alone else None
            piece = None if chunk is None else chunk.take(tensor.nbytes, device)
        if piece is None:
            return None
        copied = torch.frombuffer(piece, dtype=tensor.dtype).as_strided_(tensor.shape, stride)
        return copied.copy_(tensor, non_blocking=non_blocking)

    @contextlib.contextmanager
    def _alone(self, *, blocking: bool = True) -> Iterator[bool]:
        """Hold the lock; whether nobody did before, this thread included.

        Args:
            blocking: Whether to wait for other threads.
        """
        if not self._lock.acquire(blocking=blocking):
            yield False
            return
        is_first, self._is_busy = not self._is_busy, True
        try:
            yield is_first
        finally:
            self._is_busy = not is_first
            self._lock.release()

    def _chunk_for(self, size_bytes: int, device: torch.device) -> _Chunk | None:
        if self._is_off:
            return None
        if size_bytes * _OWN_CHUNK_PART > CHUNK_BYTES:
            own = [
                chunk
                for chunk in self._empty_chunks()
                if size_bytes <= chunk.size_bytes <= size_bytes + CHUNK_BYTES // _OWN_CHUNK_PART
            ]
            return self._begin(own) or self._pin(size_bytes, device)
        if self._filling is None or not self._filling.has_room_for(size_bytes):
            self._filling = None
            empty = [chunk for chunk in self._empty_chunks() if chunk.size_bytes == CHUNK_BYTES]
            self._filling = self._begin(empty) or self._pin(CHUNK_BYTES, device)
        return self._filling

    def _begin(self, chunks: list[_Chunk]) -> _Chunk | None:
        """Begin the smallest of some empty chunks again, once no GPU reads what was in it."""
        if not chunks or torch.cuda.is_current_stream_capturing():
            return None
        chunk = min(chunks, key=lambda chunk: chunk.size_bytes)
        try:
            chunk.wait()
        except RuntimeError:  # another thread records a CUDA graph
            return None
        chunk.begin()
        return chunk

    def _empty_chunks(self) -> list[_Chunk]:
        return [chunk for chunk in self._chunks if chunk.is_empty and chunk is not self._filling]

    def _pin(self, size_bytes: int, device: torch.device) -> _Chunk | None:
        if self._pinning_s >= PINNING_LIMIT_S:
            return None
        start_s = time.perf_counter()
        if self._is_short(size_bytes):
            self._give_back(self._chunks)  # of models whose weights had other sizes
            if self._is_short(size_bytes):
                self._turn_off(_SHORT)
                return None
        try:
            chunk = _Chunk(size_bytes, device, self._note_empty)
        except (OSError, RuntimeError) as error:
            self._turn_off(str(error).partition("\n")[0])
            return None
        self._chunks.append(chunk)
        self._pinning_s += time.perf_counter() - start_s
        return chunk

    def _is_short(self, size_bytes: int) -> bool:
        return self._available_bytes() - size_bytes < SPARE_BYTES

    def _turn_off(self, reason: str) -> None:
        if not self._is_off:
            logger.warning("Models are moved without pinned memory from now on: %s", reason)
        self._is_off = True
        self._give_back(self._chunks)

    def _note_empty(self, chunk: _Chunk) -> None:
        # Of garbage, this is called within any function, so also while another thread waits.
        if self._moves == 0:
            with self._alone(blocking=False) as alone:
                if alone:
                    self._give_back([chunk])

    def _give_back(self, chunks: list[_Chunk]) -> None:
        empty = [chunk for chunk in chunks if chunk.is_empty and chunk in self._chunks]
        # A GPU may still use them for another thread. A wait would end a recording.
        if not empty or self._moves > 1 or torch.cuda.is_current_stream_capturing():
            return
        for chunk in empty:
            try:
                chunk.wait()
                chunk.unpin()
            except RuntimeError as error:
                logger.warning("Pinned memory is kept: %s", str(error).partition("\n")[0])
                return
            self._chunks.remove(chunk)
            if self._filling is chunk:
                self._filling = None


class _Chunk:
    """Pinned memory that is handed out from its beginning to its end.

    Attributes:
        size_bytes: In whole pages.
        address, end: Where it lies.
    """

    def __init__(
        self, size_bytes: int, device: torch.device, on_empty: Callable[[_Chunk], None]
    ) -> None:
        pages = -(-size_bytes // mmap.PAGESIZE)
        self.size_bytes = pages * mmap.PAGESIZE
        self._memory = memoryview(mmap.mmap(-1, self.size_bytes))
        self._used_bytes = 0
        self._pieces: dict[int, weakref.ref[memoryview]] = {}  # those in use
        self._device, self._on_empty = device, on_empty
        self._users = {device}  # GPUs that write to it or read it
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        whole.zero_()  # by all threads; the driver would make the pages by one
        self.address = whole.data_ptr()
        self.end = self.address + self.size_bytes
        _call_cuda(device, "cudaHostRegister", self.address, self.size_bytes, 0)

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

    def take(self, size_bytes: int, device: torch.device) -> memoryview:
        """Hand out the next piece to a GPU. It is in use while anything refers to it."""
        self._users.add(device)
        piece = self._memory[self._used_bytes : self._used_bytes + size_bytes]
        self._used_bytes += -(-size_bytes // ALIGNMENT) * ALIGNMENT
        reference = weakref.ref(piece, self._has_died)
        self._pieces[id(reference)] = reference
        return piece

    def _has_died(self, reference: weakref.ref[memoryview]) -> None:
        del self._pieces[id(reference)]
        if not self._pieces:
            self._on_empty(self)

    def wait(self) -> None:
        """Wait until no GPU reads what was in it, also what hosts have launched.

        Raises:
            RuntimeError: The driver refuses.
        """
        for device in self._users:
            torch.cuda.synchronize(device)

    def unpin(self) -> None:
        """Make ordinary memory of it.

        Raises:
            RuntimeError: The driver refuses.
        """
        _call_cuda(self._device, "cudaHostUnregister", self.address)


def _call_cuda(device: torch.device, name: str, *arguments: int) -> None:
    """Call a function of the CUDA runtime for a GPU.

    Raises:
        RuntimeError: It returned an error.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        try:
            torch.cuda.check_error(int(getattr(runtime, name)(*arguments)))
        except RuntimeError:
            # CUDA remembers the error until somebody asks for it, as torch does behind each launch.
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=device).fill_(0)
            raise


# Of this process: what one model leaves is used for the next.
PINNED_MEMORY = PinnedMemory()

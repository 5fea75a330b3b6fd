"""Recognising that memory ran out, whoever says so."""

from __future__ import annotations

from onediff_ext.engine.torch_versions import OutOfMemoryError

# Of allocators and libraries that have no error class for it.
_SAYINGS = ("out of memory", "defaultcpuallocator", "alloc_failed")


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether less work at a time might do: torch has no error of its own for the CPU's memory,
    and cuBLAS, cuDNN and Triton raise plain ones."""
    if isinstance(exc, (OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exc, RuntimeError) and any(s in str(exc).lower() for s in _SAYINGS)

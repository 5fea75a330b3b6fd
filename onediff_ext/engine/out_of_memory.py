"""Recognises errors of all libraries that mean that memory ran out."""

from __future__ import annotations

from onediff_ext.engine.torch_versions import OutOfMemoryError

# Messages of allocators and libraries without an error class for it.
_MESSAGES = ("out of memory", "defaultcpuallocator", "alloc_failed")


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    torch has no error class for the CPU's memory. cuBLAS, cuDNN and Triton raise RuntimeError.

    Args:
        exc: Any error. Of a RuntimeError the message decides.
    """
    if isinstance(exc, (OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exc, RuntimeError) and any(text in str(exc).lower() for text in _MESSAGES)

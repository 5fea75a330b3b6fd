"""Recognises errors of all libraries that mean that memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

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


class AllocationFailures(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator within the ``with`` block ran out of memory.

    It sees errors that other code catches.

    Attributes:
        seen: Whether one did.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __enter__(self) -> AllocationFailures:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as exc:
            self.seen = self.seen or is_out_of_memory(exc)
            raise

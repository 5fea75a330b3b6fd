"""Products of float16 that accumulate in float16, at twice the speed on GeForce GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onediff_ext.engine.torch_versions import fp16_accumulation


class _Setting:
    """torch's setting, which all threads share: the last one that leaves restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users, self._before = 0, False

    def enter(self, before: bool) -> None:
        """Switch it on.

        Args:
            before: Its value now; restored later if nobody else has switched it on.
        """
        with self._lock:
            if self._users == 0:
                self._before = before
            self._users += 1
            torch.backends.cuda.matmul.allow_fp16_accumulation = True

    def leave(self) -> None:
        """Restore it, unless another thread is still within."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                torch.backends.cuda.matmul.allow_fp16_accumulation = self._before


_SETTING = _Setting()


@contextmanager
def accumulation(precision: str) -> Iterator[None]:
    """Accumulate float16 products as a precision asks, for a ``with`` block.

    Several threads may be within such a block at once.

    Args:
        precision: As `CompileOptions.precision`. Only ``"fp16-accumulation"`` changes anything.
    """
    before = fp16_accumulation()
    if precision != "fp16-accumulation" or before is None:
        yield
        return
    _SETTING.enter(before)
    try:
        yield
    finally:
        _SETTING.leave()

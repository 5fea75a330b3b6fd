"""Products of float16 that add up in float16, which GeForce GPUs do at twice the speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onediff_ext.engine.torch_versions import fp16_accumulation


@contextmanager
def accumulation(precision: str) -> Iterator[None]:
    """Let products add up as a precision of `CompileOptions` wants it, for a ``with`` block."""
    matmul, before = torch.backends.cuda.matmul, fp16_accumulation()
    if precision != "fp16-accumulation" or before is None:
        yield
        return
    matmul.allow_fp16_accumulation = True
    try:
        yield
    finally:
        matmul.allow_fp16_accumulation = before

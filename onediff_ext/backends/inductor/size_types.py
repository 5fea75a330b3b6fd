"""Kernels take sizes in the integer type of their indices.

Inductor computes indices in 32 bits where that is enough, but passes each symbolic size in 64. An
index divided by a size is then a division in 64 bits, which takes a GPU some hundred instructions,
for each row of a norm.

Source: `signature_to_meta` in torch/_inductor/codegen/triton_utils.py (torch 2.9 to 2.13). Its
parameter ``is_template`` has sizes follow the indices, as Inductor's own templates have it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_PARAMETER = "is_template"
_patching = threading.Lock()


@contextmanager
def sizes_as_indices() -> Iterator[None]:
    """Generate code so within this ``with`` block; without effect where torch has no such choice.

    Threads take turns.
    """
    from torch._inductor.codegen import triton

    generator: Any = triton
    with _patching:
        own = getattr(generator, "signature_to_meta", None)
        if own is None or _PARAMETER not in inspect.signature(own).parameters:
            yield
            return
        generator.signature_to_meta = partial(own, **{_PARAMETER: True})
        try:
            yield
        finally:
            generator.signature_to_meta = own

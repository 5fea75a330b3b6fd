"""Choices of Inductor that are slow for blocks of any size, and ours instead.

- **Sizes in 32 bits.** Inductor computes indices in 32 bits where that is enough, but passes each
  symbolic size in 64. An index divided by a size is then a division in 64 bits, which takes a GPU
  some hundred instructions.
- **Rows in registers.** A norm over more than 1024 channels reads its row two or three times in a
  loop. A GPU has the registers for 16384 channels.

Source: `signature_to_meta` in torch/_inductor/codegen/triton_utils.py, whose parameter
``is_template`` has sizes follow the indices, as Inductor's own templates have it; `InductorChoices`
in torch/_inductor/choices.py (torch 2.9 to 2.13).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

MOST_CHANNELS = 16384
_PARAMETER = "is_template"
_patching = threading.Lock()


@contextmanager
def our_choices() -> Iterator[None]:
    """Generate code with these choices within this ``with`` block. Threads take turns."""
    from torch._inductor.virtualized import V

    with _sizes_as_indices(), V.set_choices_handler(_choices()):
        yield


def _choices() -> Any:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint

    class RowsInRegisters(InductorChoices):
        """Keeps rows of up to `MOST_CHANNELS` in registers."""

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            channels = features.reduction_numel
            if (
                not cooperative_reduction
                and features.get_reduction_hint() in (ReductionHint.INNER, ReductionHint.DEFAULT)
                and channels.is_Integer
                and int(channels) <= MOST_CHANNELS
            ):
                return True
            return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    return RowsInRegisters()


@contextmanager
def _sizes_as_indices() -> Iterator[None]:
    """Without effect where torch has no such parameter."""
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

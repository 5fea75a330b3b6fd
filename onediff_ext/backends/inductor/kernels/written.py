"""A mark in a graph: this tensor is written to memory as it is, not in the form of who reads it.

A product takes rows [B * N, C] of tokens [B, N, C]. Where N is a sum of text and image tokens,
Inductor cannot prove that both forms are one: it computes the tokens for the first product that
reads them, and once more for the others.
"""

from __future__ import annotations

import torch
from torch.library import custom_op


@custom_op("onediff::written", mutates_args=())
def written(x: torch.Tensor) -> torch.Tensor:
    """Return the same values in a contiguous tensor."""
    return x.clone(memory_format=torch.contiguous_format)


@written.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def register_lowering() -> None:
    """Tell Inductor that the mark computes nothing."""
    from torch._inductor import ir, lowering

    target = torch.ops.onediff.written.default
    if target not in lowering.lowerings:
        register = lowering.register_lowering(target, type_promotion_kind=None)
        register(ir.ExternKernel.require_contiguous)

"""GEGLU: half of a projection times the GELU of the other half.

Source: Shazeer 2020, arXiv:2002.05202. A row is a program's own, so no address needs a division,
and loads are as wide as the machine has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

_BLOCK = 512


@triton.jit
def geglu_kernel(x_ptr, out_ptr, half, BLOCK: tl.constexpr):
    """One block of one row's output."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    source = x_ptr + row * 2 * half + column
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    gelu = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    rounded = gelu.to(out_ptr.dtype.element_ty).to(tl.float32)  # as eager rounds in between
    y = (value * rounded).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * half + column, y, mask=inside)


@triton_op("onediff::geglu", mutates_args={})
def geglu(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, 2C] → [B, T, C]: the first half times the GELU (by erf) of the second."""
    x = x.contiguous()
    batch, tokens, channels = x.shape
    out = x.new_empty((batch, tokens, channels // 2))
    wrap_triton(geglu_kernel)[(batch * tokens, -(-(channels // 2) // _BLOCK))](
        x, out, channels // 2, BLOCK=_BLOCK, num_warps=2
    )
    return out

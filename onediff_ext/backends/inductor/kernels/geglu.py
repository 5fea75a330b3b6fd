"""GEGLU: half of a projection times the GELU of the other half.

Source: Shazeer 2020, arXiv:2002.05202. A row is a program's own, so no address needs a division,
and loads are as wide as the machine has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from onediff_ext.backends.inductor.kernels.int8_rows import (
    LIMITS,
    empty_rows,
    largest,
    rounded_to,
    row_parts,
    row_scale,
)

_BLOCK = 512


@triton.jit
def normal_cdf(x):
    """The normal distribution function, from which it is 8e-8 at most.

    Source: Abramowitz and Stegun 1964, formula 7.1.26.
    """
    z = tl.abs(x)  # √2 times the formula's
    root = tl.rsqrt(1.0 + (0.3275911 / 1.4142135623730951) * z)
    t = root * root  # instead of a division
    series = -0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
    # exp(-z² / 2), by the power of two that the machine has
    tail = t * (0.127414796 + t * series) * tl.exp2(z * z * -0.7213475204444817)
    return tl.where(x > 0.0, 1.0 - tail, tail)


@triton.jit
def gated(x_ptr, row, column, inside, half):
    """Some columns of one row's output."""
    source = x_ptr + row * 2 * half + column
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    gelu = gate * normal_cdf(gate)
    rounded = gelu.to(x_ptr.dtype.element_ty).to(tl.float32)  # as eager rounds in between
    return (value * rounded).to(x_ptr.dtype.element_ty)


@triton.jit
def geglu_kernel(x_ptr, out_ptr, half, BLOCK: tl.constexpr):
    """One block of one row's output."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < half
    y = gated(x_ptr, row, column, inside, half)
    tl.store(out_ptr + row * half + column, y, mask=inside)


@triton.jit
def geglu_rows_kernel(
    x_ptr, q_ptr, scale_ptr, half, LIMIT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr
):
    """One row of the output in 8 bits, and its scale: FIRST columns and at most REST more."""
    row = tl.program_id(0)
    first = tl.arange(0, FIRST)
    rest = FIRST + tl.arange(0, REST)
    inside = rest < half
    y = gated(x_ptr, row, first, first < half, half).to(tl.float32)
    more = gated(x_ptr, row, rest, inside, half).to(tl.float32)
    scale = row_scale(largest(y, LIMIT), largest(more, LIMIT), LIMIT)
    target = q_ptr + row * half
    tl.store(target + first, rounded_to(y * (1.0 / scale), q_ptr, LIMIT))
    tl.store(target + rest, rounded_to(more * (1.0 / scale), q_ptr, LIMIT), mask=inside)
    tl.store(scale_ptr + row, scale)


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


@triton_op("onediff::geglu_in_8_bits", mutates_args={})
def geglu_in_8_bits(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`geglu`, as `rows_in_8_bits` gives it."""
    x = x.contiguous()
    batch, tokens, channels = x.shape
    half = channels // 2
    q, scale = empty_rows(x, half, dtype)
    wrap_triton(geglu_rows_kernel)[(batch * tokens,)](
        x, q, scale, half, LIMIT=LIMITS[dtype], **row_parts(half)
    )
    return q, scale

"""Rows of activations in 8 bits, and their scales: value = 8-bit number · scale.

The kernels of LayerNorm and GEGLU use these functions and write their results once, in 8 bits.
`rows_in_8_bits` serves activations from other operators.

A program holds a whole row. Rows of these models are 5 · 2^n numbers wide, so a program holds two
powers of two (FIRST and at most REST more); one power of two would leave a third of it idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

# Largest value used of each 8-bit type; the kernels tell the types apart by it.
LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@triton.jit
def largest(y, LIMIT: tl.constexpr):
    """Compute the largest absolute value.

    A NaN must reach the result, so that a broken LoRA is noticed. fp8 keeps a NaN. int8 has none,
    so the scale becomes NaN, which Triton's maximum alone would prevent.
    """
    most = tl.max(tl.abs(y), axis=0)
    if LIMIT == 127.0:
        most += tl.sum(tl.where(y == y, 0.0, y), axis=0)
    return most


@triton.jit
def row_scale(first, rest, LIMIT: tl.constexpr):
    """Compute the scale of numbers whose absolute values do not exceed these two."""
    most = tl.maximum(first, rest, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(most / LIMIT, 1e-12, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded_to(scaled, q_ptr, LIMIT: tl.constexpr):
    """Round numbers to 8 bits; values beyond the limit become the limit."""
    if LIMIT == 127.0:
        scaled = tl.floor(scaled + 0.5)
        scaled = tl.maximum(tl.minimum(scaled, LIMIT), -LIMIT)
    return scaled.to(q_ptr.dtype.element_ty)  # fp8 by PTX: cvt.rn.satfinite


@triton.jit
def rows_kernel(
    x_ptr, q_ptr, scale_ptr, channels, LIMIT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr
):
    """Quantize one row."""
    row = tl.program_id(0)
    first = tl.arange(0, FIRST)
    rest = FIRST + tl.arange(0, REST)
    inside = rest < channels
    start = row * channels
    x = tl.load(x_ptr + start + first).to(tl.float32)
    more = tl.load(x_ptr + start + rest, mask=inside, other=0.0).to(tl.float32)
    scale = row_scale(largest(x, LIMIT), largest(more, LIMIT), LIMIT)
    tl.store(q_ptr + start + first, rounded_to(x * (1.0 / scale), q_ptr, LIMIT))
    tl.store(q_ptr + start + rest, rounded_to(more * (1.0 / scale), q_ptr, LIMIT), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton_op("onediff::rows_in_8_bits", mutates_args={})
def rows_in_8_bits(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, C] → ([B*T, C] in 8 bits, scales [B*T, 1] float32)."""
    x = x.contiguous()
    batch, tokens, channels = x.shape
    q, scale = empty_rows(x, channels, dtype)
    wrap_triton(rows_kernel)[(batch * tokens,)](
        x, q, scale, channels, LIMIT=LIMITS[dtype], **row_parts(channels)
    )
    return q, scale


def empty_rows(
    x: torch.Tensor, channels: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate x [B, T, ...] in 8 bits with `channels` channels, and its scales."""
    rows = x.shape[0] * x.shape[1]
    return x.new_empty((rows, channels), dtype=dtype), x.new_empty((rows, 1), dtype=torch.float32)


def row_parts(channels: int) -> dict[str, int]:
    """Return the parts of a row that a program holds, and its number of warps.

    Up to 1280 numbers one warp is enough, so no warp waits for another.
    """
    first = triton.next_power_of_2(channels + 1) // 2
    return {
        "FIRST": first,
        "REST": triton.next_power_of_2(max(1, channels - first)),
        "num_warps": max(1, min(8, first // 1024)),
    }

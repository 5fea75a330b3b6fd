"""Rows of activations in 8 bits, and the scales by which their numbers are to be multiplied.

The kernels of LayerNorm and GEGLU end like this, so that their results are written once, in 8
bits; `rows_in_8_bits` is for activations that come from elsewhere.

A program holds a whole row, which is 5 · 2^n numbers wide in all that this is for: as two powers of
two (FIRST and at most REST more), since one would leave a third of the program idle.
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
    """The largest size of all numbers.

    A NaN has to stay one, or a broken LoRA would draw something. In fp8 it does by itself; int8
    has none, so the scale becomes one, which Triton's maximum alone would prevent.
    """
    most = tl.max(tl.abs(y), axis=0)
    if LIMIT == 127.0:
        most += tl.sum(tl.where(y == y, 0.0, y), axis=0)
    return most


@triton.jit
def row_scale(first, rest, LIMIT: tl.constexpr):
    """The scale of numbers of which none is larger than these two."""
    most = tl.maximum(first, rest, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(most / LIMIT, 1e-12, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded_to(scaled, q_ptr, LIMIT: tl.constexpr):
    """Numbers in 8 bits; what rounding has left beyond the limit comes to lie at it."""
    if LIMIT == 127.0:
        scaled = tl.floor(scaled + 0.5)
        scaled = tl.maximum(tl.minimum(scaled, LIMIT), -LIMIT)
    return scaled.to(q_ptr.dtype.element_ty)  # to fp8 as PTX does it: cvt.rn.satfinite


@triton.jit
def rows_kernel(
    x_ptr, q_ptr, scale_ptr, channels, LIMIT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr
):
    """One row."""
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
    """Room for x [B, T, ...] in 8 bits with so many channels, and for its scales."""
    rows = x.shape[0] * x.shape[1]
    return x.new_empty((rows, channels), dtype=dtype), x.new_empty((rows, 1), dtype=torch.float32)


def row_parts(channels: int) -> dict[str, int]:
    """How a program holds a row: its parts, and warps, which up to 1280 numbers do without
    waiting for each other."""
    first = triton.next_power_of_2(channels + 1) // 2
    return {
        "FIRST": first,
        "REST": triton.next_power_of_2(max(1, channels - first)),
        "num_warps": max(1, min(8, first // 1024)),
    }

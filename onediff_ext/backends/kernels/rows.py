"""Rows of activations in 8 bits, and the scales by which their numbers are to be multiplied.

The kernels of LayerNorm and GEGLU end like this, so that their results are written once, in 8
bits; `rows_in_8_bits` is for activations that come from elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

# Largest value used of each 8-bit type; the kernels tell the types apart by it.
LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


# A NaN has to stay one, or a broken LoRA would draw something: Triton's maximum drops it.


@triton.jit
def largest(y):
    """The largest size of all numbers; NaN if one of them is."""
    return tl.max(tl.abs(y), axis=0) + tl.sum(tl.where(y == y, 0.0, y), axis=0)


@triton.jit
def row_scale(most, LIMIT: tl.constexpr):
    """The scale of numbers of which none is larger than `most`."""
    return tl.maximum(most / LIMIT, 1e-12, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded_to(y, scale, q_ptr, LIMIT: tl.constexpr):
    """Numbers in 8 bits."""
    scaled = y / scale
    if LIMIT == 127.0:
        scaled = tl.floor(scaled + 0.5)
    scaled = tl.maximum(scaled, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(q_ptr.dtype.element_ty)


@triton.jit
def rows_kernel(x_ptr, q_ptr, scale_ptr, channels, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    address = row * channels + channel
    x = tl.load(x_ptr + address, mask=inside, other=0.0).to(tl.float32)
    scale = row_scale(largest(x), LIMIT)
    tl.store(q_ptr + address, rounded_to(x, scale, q_ptr, LIMIT), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton_op("onediff::rows_in_8_bits", mutates_args={})
def rows_in_8_bits(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, C] → ([B*T, C] in 8 bits, scales [B*T, 1] float32)."""
    x = x.contiguous()
    batch, tokens, channels = x.shape
    q, scale = empty_rows(x, channels, dtype)
    block = triton.next_power_of_2(channels)
    wrap_triton(rows_kernel)[(batch * tokens,)](
        x, q, scale, channels, LIMIT=LIMITS[dtype], BLOCK=block, num_warps=warps(block)
    )
    return q, scale


def empty_rows(
    x: torch.Tensor, channels: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for x [B, T, ...] in 8 bits with so many channels, and for its scales."""
    rows = x.shape[0] * x.shape[1]
    return x.new_empty((rows, channels), dtype=dtype), x.new_empty((rows, 1), dtype=torch.float32)


def warps(block: int) -> int:
    """Warps for a program that holds a row of `block` numbers."""
    return max(2, min(8, block // 1024))

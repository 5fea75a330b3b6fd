"""Rows of activations in 8 bits, each with the scale by which its numbers are to be multiplied.

`quantise` is what the kernel of LayerNorm ends with, so that its result is written once, in 8
bits; `rows_in_8_bits` is for activations that come from elsewhere. GEGLU in one with it was
slower: rows of 5120 leave a third of a program idle (31 us against 18 and 8).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

# Largest value used of each 8-bit type; the kernels tell the types apart by it.
LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@triton.jit
def quantise(y, inside, q_ptr, scale_ptr, row, address, LIMIT: tl.constexpr):
    """Write one row y in 8 bits, and its scale."""
    most = tl.max(tl.where(inside, tl.abs(y), 0.0), axis=0)
    scale = tl.maximum(most / LIMIT, 1e-12)
    scaled = y / scale
    if LIMIT == 127.0:
        scaled = tl.floor(scaled + 0.5)
    scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    tl.store(q_ptr + address, scaled.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def rows_kernel(x_ptr, q_ptr, scale_ptr, channels, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    address = row * channels + channel
    x = tl.load(x_ptr + address, mask=inside, other=0.0).to(tl.float32)
    quantise(x, inside, q_ptr, scale_ptr, row, address, LIMIT)


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

"""LayerNorm of tokens, with the residual sum before it.

One program for each token holds its whole row in registers. Inductor (torch 2.11) reads rows
of more than 1024 channels twice in a loop, at about half the speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from onediff_ext.backends.kernels.rows import (
    LIMITS,
    empty_rows,
    largest,
    rounded_to,
    row_scale,
    warps,
)


@triton.jit
def layer_norm_kernel(
    x_ptr, other_ptr, sum_ptr, weight_ptr, bias_ptr, out_ptr, scale_ptr, channels, eps,
    ADD: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: (x + other), rounded as it is stored, and its normalised self; with a LIMIT above
    zero in 8 bits. In fp8 all rows have one scale, since no number of a normalised row exceeds
    the root of their count."""
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    address = row * channels + channel
    x = tl.load(x_ptr + address, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(other_ptr + address, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + address, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, axis=0) / channels
    away = tl.where(inside, x - mean, 0.0)
    # torch hands numbers over as float64, and all that follows would be.
    inverse = (1.0 / tl.sqrt(tl.sum(away * away, axis=0) / channels + eps)).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    y = away * inverse * weight + bias
    if LIMIT == 448.0:
        bound = tl.sqrt(weight * weight * channels) + tl.abs(bias)
        scale = row_scale(largest(bound), LIMIT)
        tl.store(out_ptr + address, rounded_to(y, scale, out_ptr, LIMIT), mask=inside)
        if row == 0:
            tl.store(scale_ptr, scale)
        return
    if LIMIT > 0:
        scale = row_scale(largest(tl.where(inside, y, 0.0)), LIMIT)
        tl.store(out_ptr + address, rounded_to(y, scale, out_ptr, LIMIT), mask=inside)
        tl.store(scale_ptr + row, scale)
        return
    tl.store(out_ptr + address, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton_op("onediff::layer_norm", mutates_args={})
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise each token.

    Args:
        x: [B, T, C], C at most 8192.
        weight, bias: [C].
        eps: Added to the variance.
    """
    x = x.contiguous()
    batch, tokens, channels = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(channels)
    wrap_triton(layer_norm_kernel)[(batch * tokens,)](
        x, x, x, weight, bias, out, x, channels, eps,
        ADD=False, LIMIT=0.0, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return out


@triton_op("onediff::layer_norm_in_8_bits", mutates_args={})
def layer_norm_in_8_bits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm`, as `rows_in_8_bits` gives it; in fp8 with one scale [1]."""
    x = x.contiguous()
    batch, tokens, channels = x.shape
    q, scale = _empty(x, dtype)
    block = triton.next_power_of_2(channels)
    wrap_triton(layer_norm_kernel)[(batch * tokens,)](
        x, x, x, weight, bias, q, scale, channels, eps,
        ADD=False, LIMIT=LIMITS[dtype], BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return q, scale


@triton_op("onediff::add_layer_norm", mutates_args={})
def add_layer_norm(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + other, its `layer_norm`), both [B, T, C]."""
    x, other = x.contiguous(), other.contiguous()
    batch, tokens, channels = x.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(channels)
    wrap_triton(layer_norm_kernel)[(batch * tokens,)](
        x, other, total, weight, bias, out, x, channels, eps,
        ADD=True, LIMIT=0.0, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return total, out


@triton_op("onediff::add_layer_norm_in_8_bits", mutates_args={})
def add_layer_norm_in_8_bits(
    x: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x + other, and its `layer_norm_in_8_bits`)."""
    x, other = x.contiguous(), other.contiguous()
    batch, tokens, channels = x.shape
    total = torch.empty_like(x)
    q, scale = _empty(x, dtype)
    block = triton.next_power_of_2(channels)
    wrap_triton(layer_norm_kernel)[(batch * tokens,)](
        x, other, total, weight, bias, q, scale, channels, eps,
        ADD=True, LIMIT=LIMITS[dtype], BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return total, q, scale


def _empty(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = empty_rows(x, x.shape[-1], dtype)
    return q, scale if dtype is torch.int8 else x.new_empty((1,), dtype=torch.float32)

"""LayerNorm of tokens, with the residual sum before it.

One program for each token holds its whole row in registers. Inductor (torch 2.11) reads rows
of more than 1024 channels twice in a loop, at about half the speed.
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


@triton.jit
def _loaded(x_ptr, other_ptr, address, inside, ADD: tl.constexpr):
    """Some columns of a row, summed and rounded as eager does it."""
    x = tl.load(x_ptr + address, mask=inside, other=0.0)
    if ADD:
        other = tl.load(other_ptr + address, mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + other).to(x_ptr.dtype.element_ty)
    return x


@triton.jit
def layer_norm_kernel(
    x_ptr, other_ptr, sum_ptr, weight_ptr, bias_ptr, out_ptr, scale_ptr, channels, eps,
    ADD: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One row: (x + other), rounded as it is stored, and its normalised self; with a LIMIT above
    zero in 8 bits. In fp8 all rows have one scale, since no number of a normalised row exceeds
    the root of their count."""
    row = tl.program_id(0)
    start = row * channels
    first = tl.arange(0, FIRST)
    rest = FIRST + tl.arange(0, REST)
    inside = rest < channels
    # All loads are on their way before the first sum waits for one of them.
    x = _loaded(x_ptr, other_ptr, start + first, first < channels, ADD)
    more = _loaded(x_ptr, other_ptr, start + rest, inside, ADD)
    weight = tl.load(weight_ptr + first).to(tl.float32)
    bias = tl.load(bias_ptr + first).to(tl.float32)
    more_weight = tl.load(weight_ptr + rest, mask=inside, other=0.0).to(tl.float32)
    more_bias = tl.load(bias_ptr + rest, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        tl.store(sum_ptr + start + first, x)
        tl.store(sum_ptr + start + rest, more, mask=inside)
    x = x.to(tl.float32)
    more = more.to(tl.float32)
    mean = (tl.sum(x, axis=0) + tl.sum(more, axis=0)) / channels
    x -= mean
    more = tl.where(inside, more - mean, 0.0)
    variance = (tl.sum(x * x, axis=0) + tl.sum(more * more, axis=0)) / channels
    # torch hands numbers over as float64, and all that follows would be.
    inverse = 1.0 / tl.sqrt(variance + tl.full([], eps, tl.float32))
    y = x * inverse * weight + bias
    more = more * inverse * more_weight + more_bias
    if LIMIT > 0:
        if LIMIT == 448.0:
            root = tl.sqrt(channels * 1.0)
            bound = tl.max(tl.abs(weight) * root + tl.abs(bias), axis=0)
            more_bound = tl.max(tl.abs(more_weight) * root + tl.abs(more_bias), axis=0)
            scale = row_scale(bound, more_bound, LIMIT)
            if row == 0:
                tl.store(scale_ptr, scale)
        else:
            scale = row_scale(largest(y, LIMIT), largest(more, LIMIT), LIMIT)
            tl.store(scale_ptr + row, scale)
        tl.store(out_ptr + start + first, rounded_to(y * (1.0 / scale), out_ptr, LIMIT))
        more = rounded_to(more * (1.0 / scale), out_ptr, LIMIT)
        tl.store(out_ptr + start + rest, more, mask=inside)
    else:
        tl.store(out_ptr + start + first, y.to(out_ptr.dtype.element_ty))
        tl.store(out_ptr + start + rest, more.to(out_ptr.dtype.element_ty), mask=inside)


@triton_op("onediff::layer_norm", mutates_args={})
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalise each token.

    Args:
        x: [B, T, C], C at most 8192.
        weight, bias: [C].
        eps: Added to the variance.
        dtype: Of the result; None is x's.
    """
    x = x.contiguous()
    batch, tokens, channels = x.shape
    out = torch.empty_like(x, dtype=dtype or x.dtype)
    wrap_triton(layer_norm_kernel)[(batch * tokens,)](
        x, x, x, weight, bias, out, x, channels, eps,
        ADD=False, LIMIT=0.0, **row_parts(channels),
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
    wrap_triton(layer_norm_kernel)[(batch * tokens,)](
        x, x, x, weight, bias, q, scale, channels, eps,
        ADD=False, LIMIT=LIMITS[dtype], **row_parts(channels),
    )  # fmt: skip
    return q, scale


@triton_op("onediff::add_layer_norm", mutates_args={})
def add_layer_norm(
    x: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + other, its `layer_norm`), both [B, T, C]."""
    x, other = x.contiguous(), other.contiguous()
    batch, tokens, channels = x.shape
    total, out = torch.empty_like(x), torch.empty_like(x, dtype=dtype or x.dtype)
    wrap_triton(layer_norm_kernel)[(batch * tokens,)](
        x, other, total, weight, bias, out, x, channels, eps,
        ADD=True, LIMIT=0.0, **row_parts(channels),
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
    wrap_triton(layer_norm_kernel)[(batch * tokens,)](
        x, other, total, weight, bias, q, scale, channels, eps,
        ADD=True, LIMIT=LIMITS[dtype], **row_parts(channels),
    )  # fmt: skip
    return total, q, scale


def _empty(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = empty_rows(x, x.shape[-1], dtype)
    return q, scale if dtype is torch.int8 else x.new_empty((1,), dtype=torch.float32)

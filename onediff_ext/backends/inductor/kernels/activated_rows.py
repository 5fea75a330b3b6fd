"""GELU (tanh form) or SwiGLU of a row, alone or joined to another row, in 8 bits.

Both are x · sigmoid(x · (a + b · x²)). Each number is computed once, with one exponential
and no branch, and its row stays in registers until its largest number is known. Inductor (torch
2.11) calls libdevice's tanh, which branches at each number.
"""

from __future__ import annotations

import math

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

# The sigmoid is 1 / (1 + 2^power), power = x · (LINEAR + CUBIC · x²): a GPU has the power of two.
# Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
_TANH_FORM = -2 * math.sqrt(2 / math.pi) / math.log(2)
GELU = {"LINEAR": _TANH_FORM, "CUBIC": _TANH_FORM * 0.044715}
SILU = {"LINEAR": -1 / math.log(2), "CUBIC": 0.0}


@triton.jit
def _activated(
    x_ptr, gate_ptr, column, inside, LINEAR: tl.constexpr, CUBIC: tl.constexpr, GATED: tl.constexpr
):
    """Compute some columns of one row in float32."""
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    root = tl.rsqrt(1.0 + tl.exp2(x * (LINEAR + CUBIC * (x * x))))
    y = x * (root * root)  # instead of a division
    if GATED:
        y *= tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def activated_rows_kernel(
    x_ptr, gate_ptr, before_ptr, q_ptr, scale_ptr,
    tokens, channels, before_channels, x_batch_stride, x_stride, gate_batch_stride, gate_stride,
    before_batch_stride, before_stride,
    LINEAR: tl.constexpr, CUBIC: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    FIRST: tl.constexpr, REST: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Compute one row: BEFORE columns at most as they are, then those with the activation."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    x_ptr += batch * x_batch_stride + token * x_stride
    gate_ptr += batch * gate_batch_stride + token * gate_stride
    q_ptr += row * (before_channels + channels)
    first = tl.arange(0, FIRST)
    rest = FIRST + tl.arange(0, REST)
    inside = rest < channels
    if BEFORE:  # start this load before the first maximum waits for another one
        column = tl.arange(0, BEFORE)
        joined = column < before_channels
        source = before_ptr + batch * before_batch_stride + token * before_stride + column
        x = tl.load(source, mask=joined, other=0.0).to(tl.float32)
    y = _activated(x_ptr, gate_ptr, first, first < FIRST, LINEAR, CUBIC, GATED)
    more = _activated(x_ptr, gate_ptr, rest, inside, LINEAR, CUBIC, GATED)
    scale = row_scale(largest(y, LIMIT), largest(more, LIMIT), LIMIT)
    if BEFORE:
        most = largest(x, LIMIT)
        scale = tl.maximum(scale, row_scale(most, most, LIMIT), propagate_nan=tl.PropagateNan.ALL)
        tl.store(q_ptr + column, rounded_to(x * (1.0 / scale), q_ptr, LIMIT), mask=joined)
    q_ptr += before_channels
    tl.store(q_ptr + first, rounded_to(y * (1.0 / scale), q_ptr, LIMIT))
    tl.store(q_ptr + rest, rounded_to(more * (1.0 / scale), q_ptr, LIMIT), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton_op("onediff::gelu_in_8_bits", mutates_args={})
def gelu_in_8_bits(
    x: torch.Tensor, before: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of `before` and the GELU (tanh form) of x, joined, as from `rows_in_8_bits`.

    Args:
        x: [B, T, C].
        before: [B, T, D], or None.
        dtype: Of the rows.

    Returns:
        [B*T, D + C] of dtype, and scales [B*T, 1] float32.
    """
    return _rows(x, None, before, dtype, GELU)


@triton_op("onediff::swiglu_in_8_bits", mutates_args={})
def swiglu_in_8_bits(
    x: torch.Tensor, gate: torch.Tensor, before: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gelu_in_8_bits`, but with SiLU of x times gate [B, T, C]."""
    return _rows(x, gate, before, dtype, SILU)


def _rows(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    before: torch.Tensor | None,
    dtype: torch.dtype,
    activation: dict[str, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    x = _dense(x)
    batch, tokens, channels = x.shape
    gated = x if gate is None else _dense(gate)
    joined = x if before is None else _dense(before)
    joined_channels = 0 if before is None else joined.shape[2]
    q, scale = empty_rows(x, joined_channels + channels, dtype)
    wrap_triton(activated_rows_kernel)[(batch * tokens,)](
        x, gated, joined, q, scale,
        tokens, channels, joined_channels, x.stride(0), x.stride(1), gated.stride(0),
        gated.stride(1), joined.stride(0), joined.stride(1),
        GATED=gate is not None, LIMIT=LIMITS[dtype], **activation,
        **parts_of(channels, joined_channels),
    )  # fmt: skip
    return q, scale


def parts_of(channels: int, before: int) -> dict[str, int]:
    """Return the parts of a row that a program holds, and its number of warps."""
    return {"BEFORE": triton.next_power_of_2(before) if before else 0, **row_parts(channels)}


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, C] with the numbers of each token side by side in memory."""
    return x if x.stride(2) == 1 else x.contiguous()

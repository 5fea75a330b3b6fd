"""GroupNorm of an NHWC image batch, with SiLU when it follows.

Inductor (torch 2.11) reduces groups of an NHWC image one element at a time, with divisions in
each address and a split that is frozen at the example's size: 50-70 µs a call at any size.
Here each program reads whole rows of channels; moments are merged as differences from a mean, so
that a large one loses no digits (Chan, Golub, LeVeque 1979).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

CHUNKS = 256  # programs that share an image's rows
# Pixels, channels and warps of a program: the best of 81 combinations on an H200, where a
# quarter of the time of the first choice was enough.
_ROWS = 64
_CHANNELS = 64
_WARPS = 2
_APPLY_ROWS = 32


@triton.jit
def moments_kernel(
    x_ptr, count_ptr, mean_ptr, m2_ptr, pixels, channels,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, CHANNELS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared differences of each channel over one chunk of an image's pixels."""
    image, chunk, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    per_chunk = tl.cdiv(tl.cdiv(pixels, CHUNKS), ROWS) * ROWS
    start = chunk * per_chunk
    stop = tl.minimum(start + per_chunk, pixels)
    if start < stop:
        channel = block * CHANNELS_BLOCK + tl.arange(0, CHANNELS_BLOCK)
        inside = channel < channels
        mean = tl.zeros([CHANNELS_BLOCK], tl.float32)
        m2 = tl.zeros([CHANNELS_BLOCK], tl.float32)
        count = 0.0
        for first in range(start, stop, ROWS):
            row = first + tl.arange(0, ROWS)
            valid = (row < stop)[:, None] & inside[None, :]
            address = (image * pixels + row)[:, None] * channels + channel[None, :]
            x = tl.load(x_ptr + address, mask=valid, other=0.0).to(tl.float32)
            new = tl.minimum(stop - first, ROWS).to(tl.float32)
            new_mean = tl.sum(x, axis=0) / new
            away = tl.where(valid, x - new_mean[None, :], 0.0)
            total = count + new
            delta = new_mean - mean
            mean += delta * (new / total)
            m2 += tl.sum(away * away, axis=0) + delta * delta * (count * new / total)
            count = total
        target = (image * CHUNKS + chunk) * channels + channel
        tl.store(mean_ptr + target, mean, mask=inside)
        tl.store(m2_ptr + target, m2, mask=inside)
        if block == 0:
            tl.store(count_ptr + image * CHUNKS + chunk, count)


@triton.jit
def scale_kernel(
    count_ptr, mean_ptr, m2_ptr, weight_ptr, bias_ptr, added_ptr, scale_ptr, shift_ptr,
    pixels, channels, group_channels, added_stride, eps,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """What each channel is multiplied with and added to, from the moments of its group."""
    image, group = tl.program_id(0), tl.program_id(1)
    per_chunk = tl.cdiv(tl.cdiv(pixels, CHUNKS), ROWS) * ROWS
    used = tl.cdiv(pixels, per_chunk)
    lane = tl.arange(0, GROUP_BLOCK)
    channel = group * group_channels + lane
    inside = lane < group_channels
    added = tl.zeros([GROUP_BLOCK], tl.float32)
    if ADD:  # it moves a channel's mean, and no difference from the mean
        added += tl.load(added_ptr + image * added_stride + channel, mask=inside, other=0.0)
    elements = pixels * group_channels * 1.0
    about = 0.0  # the mean of what comes first; what is summed are differences from it
    total = tl.zeros([CHUNKS_BLOCK, GROUP_BLOCK], tl.float32)
    squares = tl.zeros([CHUNKS_BLOCK, GROUP_BLOCK], tl.float32)
    for first in range(0, used, CHUNKS_BLOCK):
        chunk = first + tl.arange(0, CHUNKS_BLOCK)
        there = chunk < used
        count = tl.load(count_ptr + image * CHUNKS + chunk, mask=there, other=0.0)[:, None]
        address = (image * CHUNKS + chunk)[:, None] * channels + channel[None, :]
        mask = there[:, None] & inside[None, :]
        mean = tl.load(mean_ptr + address, mask=mask, other=0.0) + added[None, :]
        m2 = tl.load(m2_ptr + address, mask=mask, other=0.0)
        if first == 0:
            about = tl.sum(mean * count) / (tl.sum(count) * group_channels)
        delta = tl.where(mask, mean - about, 0.0)
        total += delta * count
        squares += m2 + delta * delta * count
    off = tl.sum(total) / elements
    group_mean = about + off
    variance = tl.sum(squares) / elements - off * off
    inverse = 1.0 / tl.sqrt(variance + tl.full([], eps, tl.float32))  # torch gives float64
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    scale = weight * inverse
    tl.store(scale_ptr + image * channels + channel, scale, mask=inside)
    shift = bias + (added - group_mean) * scale
    tl.store(shift_ptr + image * channels + channel, shift, mask=inside)


@triton.jit
def apply_kernel(
    x_ptr, scale_ptr, shift_ptr, out_ptr, pixels, channels,
    SILU: tl.constexpr, ROUNDED: tl.constexpr, ROWS: tl.constexpr, CHANNELS_BLOCK: tl.constexpr,
):  # fmt: skip
    """x · scale + shift, channel by channel, through SiLU if asked for."""
    rows, image, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = block * CHANNELS_BLOCK + tl.arange(0, CHANNELS_BLOCK)
    row = rows * ROWS + tl.arange(0, ROWS)
    inside = channel < channels
    valid = (row < pixels)[:, None] & inside[None, :]
    scale = tl.load(scale_ptr + image * channels + channel, mask=inside, other=0.0)
    shift = tl.load(shift_ptr + image * channels + channel, mask=inside, other=0.0)
    address = (image * pixels + row)[:, None] * channels + channel[None, :]
    x = tl.load(x_ptr + address, mask=valid, other=0.0).to(tl.float32)
    y = x * scale[None, :] + shift[None, :]
    if SILU:
        if ROUNDED:
            y = y.to(out_ptr.dtype.element_ty).to(tl.float32)  # as eager rounds in between
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + address, y.to(out_ptr.dtype.element_ty), mask=valid)


@triton_op("onediff::group_norm", mutates_args={})
def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    silu: bool,
    added: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    rounded: bool = True,
) -> torch.Tensor:
    """Normalise each group of channels of each image.

    Args:
        x: [B, C, H, W]; read as NHWC.
        groups: How many; C is a multiple of it.
        weight, bias: [C].
        eps: Added to the variance.
        silu: Whether SiLU follows.
        added: [B or 1, C, 1, 1], summed to x first: a convolution's bias, a time embedding.
        dtype: Of the result; None is x's.
        rounded: Whether what SiLU takes is of this dtype too, or float32.

    Returns:
        [B, C, H, W], in NHWC order.
    """
    rows = x.permute(0, 2, 3, 1).contiguous()
    batch, height, width, channels = rows.shape
    pixels = height * width
    counts = x.new_empty((batch, CHUNKS), dtype=torch.float32)
    means = x.new_empty((batch, CHUNKS, channels), dtype=torch.float32)
    squares = torch.empty_like(means)
    scale = x.new_empty((batch, channels), dtype=torch.float32)
    shift = torch.empty_like(scale)
    out = torch.empty_like(rows, dtype=dtype or x.dtype)
    chunks = torch.sym_min(CHUNKS, (pixels + _ROWS - 1) // _ROWS)
    wrap_triton(moments_kernel)[(batch, chunks, -(-channels // _CHANNELS))](
        rows, counts, means, squares, pixels, channels,
        CHUNKS=CHUNKS, ROWS=_ROWS, CHANNELS_BLOCK=_CHANNELS, num_warps=_WARPS,
    )  # fmt: skip
    group_block = triton.next_power_of_2(channels // groups)
    wrap_triton(scale_kernel)[(batch, groups)](
        counts, means, squares, weight, bias,
        weight if added is None else added.reshape(-1, channels).contiguous(),
        scale, shift, pixels, channels, channels // groups,
        0 if added is None or added.shape[0] == 1 else channels, eps,
        CHUNKS=CHUNKS, ROWS=_ROWS, CHUNKS_BLOCK=max(16, 2048 // group_block),
        GROUP_BLOCK=group_block, ADD=added is not None, num_warps=8,
    )  # fmt: skip
    wide = 64 if channels % 128 else 128
    blocks = -(-channels // wide)
    # The most programs first: a grid's other two dims end at 65,535.
    wrap_triton(apply_kernel)[((pixels + _APPLY_ROWS - 1) // _APPLY_ROWS, batch, blocks)](
        rows, scale, shift, out, pixels, channels,
        SILU=silu, ROUNDED=rounded, ROWS=_APPLY_ROWS, CHANNELS_BLOCK=wide, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)

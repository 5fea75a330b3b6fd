"""RMSNorm of each head of queries or keys, then RoPE, for text and image tokens joined.

A program has the heads of one token. RoPE turns neighbouring channels as pairs; the program holds
both. Inductor (torch 2.11) reads each number's neighbour as one more load of two bytes, at less
than half the speed, and writes the joined norm before it is turned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton


@triton.jit
def _normed(x, weight, eps, CHANNELS: tl.constexpr, dtype: tl.constexpr):
    """Compute the norm of each row of x in float32, rounded as eager stores it."""
    # torch passes numbers as float64, which would make all that follows float64.
    mean = tl.sum(x * x, axis=1) / CHANNELS + tl.full([], eps, tl.float32)
    return (x * tl.rsqrt(mean)[:, None] * weight[None, :]).to(dtype).to(tl.float32)


@triton.jit
def rotary_norm_kernel(
    text_ptr, image_ptr, text_weight_ptr, image_weight_ptr, cos_ptr, sin_ptr, out_ptr,
    text_tokens, tokens, text_batch_stride, text_stride, image_batch_stride, image_stride,
    heads, eps,
    JOINED: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute one token of [B, T, H, D]; HEADS is a power of two, at least H."""
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    token = row % tokens
    batch = row // tokens
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, CHANNELS)
    at = head * CHANNELS + channel[None, :]
    inside = (head < heads) & (channel[None, :] < CHANNELS)
    cos = tl.load(cos_ptr + token * CHANNELS + channel)
    sin = tl.load(sin_ptr + token * CHANNELS + channel)
    start = batch * image_batch_stride + (token - text_tokens) * image_stride
    if JOINED:
        is_text = token < text_tokens
        text_start = batch * text_batch_stride + token * text_stride
        x = tl.load(image_ptr + start + at, mask=inside & (token >= text_tokens), other=0.0)
        x += tl.load(text_ptr + text_start + at, mask=inside & is_text, other=0.0)
        known = channel < CHANNELS
        weight = tl.load(image_weight_ptr + channel, mask=known & (token >= text_tokens), other=0.0)
        weight += tl.load(text_weight_ptr + channel, mask=known & is_text, other=0.0)
    else:
        x = tl.load(image_ptr + start + at, mask=inside, other=0.0)
        weight = tl.load(image_weight_ptr + channel)
    y = _normed(x.to(tl.float32), weight.to(tl.float32), eps, CHANNELS, dtype)
    first, second = tl.split(tl.reshape(y, [HEADS, CHANNELS // 2, 2]))
    turned = tl.reshape(tl.join(-second, first), [HEADS, CHANNELS])
    y = y * cos[None, :] + turned * sin[None, :]
    tl.store(out_ptr + row * heads * CHANNELS + at, y.to(dtype), mask=inside)


@triton_op("onediff::rotary_norm", mutates_args={})
def rotary_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Normalise each head of each token, and turn its pairs of channels.

    Args:
        x: [B, T, H, D], D a power of two.
        weight: [D].
        eps: Added to the mean of the squares.
        cos, sin: [1, T, 1, D] float32; both numbers of a pair have the same angle.

    Returns:
        [B, T, H, D], contiguous.
    """
    x = _dense_tokens(x)
    batch, tokens, heads, channels = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    wrap_triton(rotary_norm_kernel)[(batch * tokens,)](
        x, x, weight, weight, cos.contiguous(), sin.contiguous(), out,
        0, tokens, 0, 0, x.stride(0), x.stride(1), heads, eps,
        JOINED=False, HEADS=triton.next_power_of_2(heads), CHANNELS=channels, num_warps=4,
    )  # fmt: skip
    return out


@triton_op("onediff::joined_rotary_norm", mutates_args={})
def joined_rotary_norm(
    text: torch.Tensor,
    image: torch.Tensor,
    text_weight: torch.Tensor,
    image_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """`rotary_norm` of text [B, S, H, D] and image [B, N, H, D], joined to [B, S + N, H, D]."""
    text, image = _dense_tokens(text), _dense_tokens(image)
    batch, text_tokens, heads, channels = text.shape
    tokens = text_tokens + image.shape[1]
    out = text.new_empty((batch, tokens, heads, channels))
    wrap_triton(rotary_norm_kernel)[(batch * tokens,)](
        text, image, text_weight, image_weight, cos.contiguous(), sin.contiguous(), out,
        text_tokens, tokens, text.stride(0), text.stride(1), image.stride(0), image.stride(1),
        heads, eps,
        JOINED=True, HEADS=triton.next_power_of_2(heads), CHANNELS=channels, num_warps=4,
    )  # fmt: skip
    return out


def _dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, T, H, D] with the numbers of each token side by side in memory."""
    dense = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if dense else x.contiguous()

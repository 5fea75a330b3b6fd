"""Attention by PyTorch's own kernel, for copies of blocks whose hosts compute it otherwise.

Hosts slice attention by free memory, freeze sizes or call kernels that cannot be traced;
this gives the same result and leaves every size symbolic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    attention: Any, x: torch.Tensor, context: torch.Tensor | None = None, *, upcast: bool = False
) -> torch.Tensor:
    """CrossAttention of the CompVis family, with its own projections.

    Args:
        attention: Has ``heads``, ``to_q``, ``to_k``, ``to_v`` and ``to_out``.
        x: [B, N, D].
        context: [B, M, C], or None for self-attention.
        upcast: Compute in float32.

    Returns:
        [B, N, D].
    """
    source = x if context is None else context
    heads = attention.heads
    q, k, v = (
        projected.unflatten(-1, (heads, -1)).transpose(1, 2)
        for projected in (attention.to_q(x), attention.to_k(source), attention.to_v(source))
    )
    mixed = _mix(q, k, v, upcast)
    output: torch.Tensor = attention.to_out(mixed.transpose(1, 2).flatten(2))
    return output


def attend_image(block: Any, x: torch.Tensor, *, upcast: bool = False) -> torch.Tensor:
    """The VAE's AttnBlock: self-attention of one head over all cells.

    Args:
        block: Has ``norm``, ``q``, ``k``, ``v`` and ``proj_out``.
        x: [B, C, H, W].
        upcast: Compute in float32.

    Returns:
        [B, C, H, W].
    """
    normed = block.norm(x)
    q, k, v = (
        part(normed).flatten(2).transpose(1, 2).unsqueeze(1) for part in (block.q, block.k, block.v)
    )
    image = _mix(q, k, v, upcast).squeeze(1).transpose(1, 2).reshape(*normed.shape)
    output: torch.Tensor = x + block.proj_out(image)
    return output


def _mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, upcast: bool) -> torch.Tensor:
    dtype = q.dtype
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
    return scaled_dot_product_attention(q, k, v).to(dtype)

"""Self-attention by FlashAttention 4, as one operator of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op

from onediff_ext.backends.inductor.flash_attention import Kernel, StoredKernel, attend
from onediff_ext.backends.inductor.flash_compiler import compiled


@custom_op("onediff::flash_attention", mutates_args=())
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(q · kᵀ · scale) · v.

    Args:
        q: [B, H, T, D], in 16 bits, D a multiple of 8 and at most 256.
        k, v: [B, H, S, D].
        scale: Factor of the products, above zero.

    Returns:
        [B, H, T, D], in memory as [B, T, H, D].
    """
    return attend(q, k, v, scale)


@flash_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:  # noqa: ARG001
    batch, heads, tokens, width = q.shape
    return q.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def flash_kernels(graph_module: Any) -> dict[Kernel, StoredKernel]:
    """Return the kernels that a rewritten graph calls."""
    found = {}
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.onediff.flash_attention.default:
            form = node.args[0].meta["val"]
            kernel = Kernel(form.dtype, int(form.shape[-1]))
            stored = compiled(kernel, form.device)
            if stored is not None:
                found[kernel] = stored
    return found

"""Rows in 8 bits that come from a GELU or a SwiGLU, which one kernel computes and quantizes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from onediff_ext.backends.inductor.code_choices import MOST_CHANNELS
from onediff_ext.backends.inductor.kernels.fx_nodes import ATEN, DTYPES, arguments_of


def activated_rows(x: Any, dtype: torch.dtype) -> Any:
    """Return a new call that computes x [B, T, C] in 8 bits and its scales.

    Args:
        x: A node that one quantization reads.
        dtype: Of the rows.

    Returns:
        A node at the graph's place of insertion. None where x is no activation, and where it is no
        activation behind other channels either.
    """
    if not _fits(x):
        return None
    before, activated = None, x
    if x.target is ATEN.cat.default:
        parts, dim = arguments_of(x, 2)
        if len(parts) != 2 or dim not in (-1, 2):
            return None
        before, activated = parts
        if not (_fits(before) and _fits(activated)) or len(activated.users) != 1:
            return None
    graph, ops = x.graph, torch.ops.onediff
    if activated.target is ATEN.gelu.default:
        source, approximate = arguments_of(activated, 2)
        if approximate != "tanh" or not _fits(source):
            return None
        return graph.call_function(ops.gelu_in_8_bits.default, (source, before, dtype))
    gated = _gated(activated)
    if gated is None:
        return None
    return graph.call_function(ops.swiglu_in_8_bits.default, (*gated, before, dtype))


def _gated(product: Any) -> tuple[Any, Any] | None:
    """Return x and gate of SiLU(x) · gate, or None."""
    if product.target is not ATEN.mul.Tensor or len(product.args) != 2 or product.kwargs:
        return None
    for silu, gate in (product.args, product.args[::-1]):
        if isinstance(silu, Node) and silu.target is ATEN.silu.default and len(silu.users) == 1:
            x = silu.args[0]
            shapes = [_shape(node) for node in (x, gate, product)]
            if _fits(x) and shapes[0] == shapes[1] == shapes[2]:
                return x, gate
    return None


def _shape(node: Any) -> list[str] | None:
    value = node.meta["val"] if isinstance(node, Node) else None
    return [str(size) for size in value.shape] if isinstance(value, torch.Tensor) else None


def _fits(node: Any) -> bool:
    """Whether a node is [B, T, C] of a type and a width that the kernel takes."""
    value = node.meta["val"]
    if value.ndim != 3 or value.dtype not in DTYPES:
        return False
    return isinstance(value.shape[2], int) and value.shape[2] <= MOST_CHANNELS

"""GEGLU, half of a projection times the GELU of the other half, becomes our kernel."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from onediff_ext.backends.inductor.kernels.fx_nodes import ATEN, DTYPES, replace


def rewrite_geglu(node: Any) -> None:
    """Replace a product of one half [B, T, C] of a tensor with the GELU of its other half."""
    value, gelu = node.args[:2]
    if not (isinstance(value, Node) and isinstance(gelu, Node)) or node.kwargs:
        return
    if value.target is ATEN.gelu.default:
        value, gelu = gelu, value
    if gelu.target is not ATEN.gelu.default or len(gelu.args) != 1 or gelu.kwargs:
        return
    first, second = _half(value), _half(gelu.args[0])
    if first is None or second is None or first[0] is not second[0]:
        return
    if (first[1], second[1]) == (0, 1):
        replace(node, torch.ops.onediff.geglu.default, (first[0],))


def _half(node: Any) -> tuple[Node, int] | None:
    """Return (tensor [B, T, 2C], 0 or 1) for a node that is one of its halves along C, or None."""
    if node.target is not operator.getitem:
        return None
    halves, index = node.args
    if halves.target not in (ATEN.chunk.default, ATEN.split.Tensor):
        return None
    whole, size, dim = (*halves.args, 0)[:3]
    shape = whole.meta["val"].shape
    if whole.meta["val"].dtype not in DTYPES or len(shape) != 3 or dim not in (-1, 2):
        return None
    wanted = 2 if halves.target is ATEN.chunk.default else shape[-1] // 2
    if not isinstance(shape[-1], int) or shape[-1] % 2 or size != wanted:
        return None
    return whole, index

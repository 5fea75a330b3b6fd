"""RoPE's rotated pairs become a swap of neighbours, which fuses with what reads them."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from onediff_ext.backends.inductor.kernels.fx_nodes import ATEN, arguments_of


def rewrite_rotated_pairs(node: Any) -> None:
    """Replace the stack [-b, a] of pairs [..., 2] of a and b by their swap, times [-1, 1].

    Inductor writes a stack to memory half by half, with gaps; a swap is another index to it.
    """
    parts, dim = arguments_of(node, 2)
    value = node.meta["val"]
    if len(parts) != 2 or dim not in (-1, value.ndim - 1):
        return
    negative, first = parts
    if negative.target is not ATEN.neg.default:
        return
    second = negative.args[0]
    if not all(isinstance(n, Node) and n.target is operator.getitem for n in (first, second)):
        return
    unbind = first.args[0]
    if unbind is not second.args[0] or unbind.target is not ATEN.unbind.int:
        return
    pairs, of_dim = arguments_of(unbind, 2)
    if of_dim not in (-1, value.ndim - 1) or (first.args[1], second.args[1]) != (0, 1):
        return
    graph = node.graph
    with graph.inserting_before(node):
        swapped = graph.call_function(ATEN.flip.default, (pairs, [-1]))
        sign = graph.call_function(
            ATEN.arange.start_step,
            (-1, 3, 2),
            {"dtype": value.dtype, "device": value.device},
        )
        rotated = graph.call_function(ATEN.mul.Tensor, (swapped, sign))
    swapped.meta["val"] = rotated.meta["val"] = value
    sign.meta["val"] = value.new_empty(2)
    node.replace_all_uses_with(rotated)

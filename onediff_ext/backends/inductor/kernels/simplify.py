"""Drops and renames operations of a graph that would keep others from fusing."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from onediff_ext.backends.inductor.kernels.fx_nodes import ATEN, is_cast, replace


def drop_cast_to_itself(node: Any) -> None:
    """Drop a cast to the type that its input already has."""
    if is_cast(node) and node.args[0].meta["val"].dtype == node.meta["val"].dtype:
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)


def drop_dropout(node: Any) -> None:
    """Drop a dropout without effect, which keeps its neighbours from fusing."""
    if node.target is not ATEN.dropout.default:
        return
    x, share, training = node.args
    if not training or share == 0.0:
        node.replace_all_uses_with(x)
        node.graph.erase_node(node)  # it would count as a user of its input


def swish_to_silu(node: Any) -> None:
    """Replace x · sigmoid(x), which CompVis' VAE writes, by SiLU."""
    if node.target is not ATEN.mul.Tensor or node.kwargs:
        return
    x, gate = node.args
    if isinstance(x, Node) and x.target is ATEN.sigmoid.default:
        x, gate = gate, x
    if isinstance(gate, Node) and gate.target is ATEN.sigmoid.default and gate.args[0] is x:
        replace(node, ATEN.silu.default, (x,))
        node.graph.erase_node(node)
        if not gate.users:
            node.graph.erase_node(gate)


def drop_division_by_one(node: Any) -> None:
    """Drop a division by one, which keeps its neighbours from fusing."""
    x, divisor = node.args[:2]
    if divisor == 1.0 and not isinstance(divisor, Node) and isinstance(x, Node):
        value = x.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(x)


def name_inferred_size(node: Any) -> None:
    """Replace the -1 of a reshape by its number where that is the same for all inputs.

    Torch infers a size as a quotient of products of symbols. Where batch times a sum of token counts
    is divided by itself times a number, it keeps the quotient, and kernels divide by it at each
    element.
    """
    if node.target not in (ATEN.reshape.default, ATEN.view.default):
        return
    x, sizes = node.args
    if -1 not in sizes:
        return
    place = list(sizes).index(-1)
    number = _constant(node.meta["val"].shape[place])
    if number is not None:
        node.args = (x, [*sizes[:place], number, *sizes[place + 1 :]])


def _constant(size: Any) -> int | None:
    """Return the value of a size that does not depend on its symbols, or None."""
    if isinstance(size, int):
        return size
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.functions import FloorDiv

    def divided(whole: Any, part: Any) -> Any:
        quotient = sympy.cancel(whole / part)
        return quotient if quotient.is_Integer else FloorDiv(whole, part)

    expression = sympy.expand(size.node.expr.replace(FloorDiv, divided))
    return int(expression) if expression.is_Integer else None

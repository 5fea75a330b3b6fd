"""Matrix products: GELU in the product's own epilogue, no joined inputs, inputs written once."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from onediff_ext.backends.inductor.kernels.fx_nodes import ATEN, arguments_of


def rewrite_gelu_product(node: Any) -> None:
    """Replace the GELU (tanh form) of a linear layer's output by cuBLAS' epilogue.

    A separate GELU reads and writes the widest activation of a block once more.
    """
    x, approximate = arguments_of(node, 2)
    if approximate != "tanh" or x.target is not ATEN.linear.default or len(x.users) != 1:
        return
    tokens, weight, bias = arguments_of(x, 3)
    if not isinstance(bias, Node) or not _on_16_bits(x) or x.meta["val"].ndim < 2:
        return
    with node.graph.inserting_before(node):
        rows = _rows_of(tokens)
        product = node.graph.call_function(
            ATEN._addmm_activation.default,
            (bias, rows, _transposed(weight)),
            {"use_gelu": True},
        )
        product.meta["val"] = _two_dimensional(node.meta["val"])
        node.replace_all_uses_with(_like(product, tokens, weight, node.meta["val"]))


def rewrite_joined_product(node: Any) -> None:
    """Replace a linear layer on channels that were joined by the sum of a product for each part.

    The joined tensor is not written then.
    """
    x, weight, bias = arguments_of(node, 3)
    if x.target is not ATEN.cat.default or len(x.users) != 1 or not _on_16_bits(node):
        return
    parts, dim = arguments_of(x, 2)
    widths = [part.meta["val"].shape[-1] for part in parts]
    if dim not in (-1, x.meta["val"].ndim - 1) or not all(isinstance(w, int) for w in widths):
        return
    graph, total, start = node.graph, None, 0
    with graph.inserting_before(node):
        for part, width in zip(parts, widths, strict=True):
            columns = graph.call_function(ATEN.slice.Tensor, (weight, 1, start, start + width))
            columns.meta["val"] = weight.meta["val"][:, start : start + width]
            product = graph.call_function(
                ATEN.linear.default, (part, columns, bias if total is None else None)
            )
            product.meta["val"] = node.meta["val"]
            if total is not None:
                product = graph.call_function(ATEN.add.Tensor, (total, product))
                product.meta["val"] = node.meta["val"]
            total, start = product, start + width
    assert total is not None
    node.replace_all_uses_with(total)


def write_inputs_once(node: Any) -> None:
    """Mark the tokens [B, N, C] that a linear layer reads as `written`, where N is a sum."""
    written = torch.ops.onediff.written.default
    x = node.args[0]
    while x.target in _VIEWS:
        x = x.args[0]
    if not _is_joined(x.meta["val"]) or x.target is written or _lies_in_memory(x):
        return
    with node.graph.inserting_after(x):
        kept = node.graph.call_function(written, (x,))
    kept.meta["val"] = x.meta["val"]
    x.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


_VIEWS = (ATEN.reshape.default, ATEN.view.default, ATEN.flatten.using_ints, ATEN.unsqueeze.default)


def _is_joined(value: torch.Tensor) -> bool:
    """Whether a tensor's tokens are those of text and image."""
    size = value.shape[1] if value.ndim == 3 else 0
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Add)


def _lies_in_memory(node: Any) -> bool:
    """Whether a node is an input, or the output of a product."""
    return node.op == "placeholder" or node.target in (
        ATEN.linear.default,
        ATEN._addmm_activation.default,
        ATEN._scaled_mm.default,
    )


def _on_16_bits(node: Any) -> bool:
    return node.meta["val"].dtype in (torch.float16, torch.bfloat16)


def _rows_of(tokens: Any) -> Any:
    if tokens.meta["val"].ndim == 2:
        return tokens
    width = tokens.meta["val"].shape[-1]
    rows = tokens.graph.call_function(ATEN.reshape.default, (tokens, [-1, width]))
    rows.meta["val"] = _two_dimensional(tokens.meta["val"])
    return rows


def _two_dimensional(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(0, -2)


def _transposed(weight: Any) -> Any:
    turned = weight.graph.call_function(ATEN.t.default, (weight,))
    turned.meta["val"] = weight.meta["val"].t()
    return turned


def _like(rows: Any, tokens: Any, weight: Any, value: torch.Tensor) -> Any:
    """Return rows in the form of the tokens that they are the product of."""
    if value.ndim == 2:
        return rows
    graph = rows.graph
    sizes = [graph.call_function(ATEN.sym_size.int, (tokens, dim)) for dim in range(value.ndim - 1)]
    shaped = graph.call_function(
        ATEN.reshape.default, (rows, [*sizes, weight.meta["val"].shape[0]])
    )
    shaped.meta["val"] = value
    return shaped

"""Biases of layers that are one product in 8 bits are added in the product's epilogue."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from onediff_ext.backends.inductor.kernels.fx_nodes import ATEN, arguments_of, only_user

_LARGEST = 2**63 - 1


def rewrite_joined_biases(node: Any) -> None:
    """Replace the sum of each layer's part of a product with its bias by one bias of the product.

    `QuantizedLinears` traces the parts as slices. A sum that kernels of ours or attention read is
    written to memory; a slice alone is only an address.
    """
    _, weight, scale, _, bias = arguments_of(node, 5)
    if bias is not None or scale.meta["val"].ndim != 1:
        return
    if node.meta["val"].dtype not in (torch.float16, torch.bfloat16):
        return
    shaped = only_user(node, ATEN.reshape.default, ATEN.view.default)
    found = [_part(user) for user in shaped.users] if shaped is not None else []
    parts = sorted((part for part in found if part is not None), key=lambda part: part.start)
    ends = [0, *(part.end for part in parts)]
    if not parts or len(parts) != len(found):
        return
    if [*(part.start for part in parts), weight.meta["val"].shape[1]] != ends:
        return
    biases = [part.bias for part in parts]
    with node.graph.inserting_before(node):
        joined = node.graph.call_function(ATEN.cat.default, (biases,))
    joined.meta["val"] = torch.cat([each.meta["val"] for each in biases])
    node.args = (*node.args[:4], joined, *node.args[5:])
    for part in parts:
        part.total.replace_all_uses_with(part.total.args[0])
        node.graph.erase_node(part.total)


class _Part(NamedTuple):
    """A slice of a product's channels, and the sum of it and a bias [end - start]."""

    start: int
    end: int
    bias: Any
    total: Any


def _part(node: Any) -> _Part | None:
    if node.target is not ATEN.slice.Tensor:
        return None
    x, dim, start, end, step = arguments_of(node, 5)
    value = x.meta["val"]
    total = only_user(node, ATEN.add.Tensor)
    if total is None or total.kwargs or dim not in (-1, value.ndim - 1) or step not in (None, 1):
        return None
    start, end = start or 0, value.shape[-1] if end in (None, _LARGEST) else end
    other: Any = total.args[1]
    # Weights stand before all products.
    if not isinstance(other, Node) or other.op != "placeholder":
        return None
    bias = other.meta["val"]
    same = bias.shape == (end - start,) and bias.dtype == value.dtype == total.meta["val"].dtype
    return _Part(start, end, other, total) if same else None

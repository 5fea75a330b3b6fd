"""GroupNorm and LayerNorm become our kernels, with the sums, casts and SiLU around them.

Autocast computes norms in float32 and adds a cast before and after each. Our kernels compute in
float32 whatever types they read and write, so they take over these casts.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from onediff_ext.backends.inductor.kernels.fx_nodes import (
    ATEN,
    DTYPES,
    arguments_of,
    is_sum,
    narrowing_cast,
    only_user,
    position,
    replace,
    uncast,
)


def rewrite_group_norm(node: Any) -> None:
    """Replace a GroupNorm with affine weights [C], and the SiLU after it."""
    x, groups, weight, bias, *rest = arguments_of(node, 6)
    value = x.meta["val"]
    if weight is None or bias is None or value.ndim != 4 or value.dtype not in DTYPES:
        return
    eps = rest[0] if rest and rest[0] is not None else 1e-5
    last, rounded = node, True
    narrow = narrowing_cast(last)
    if narrow is not None:
        last = narrow
    silu = only_user(last, ATEN.silu.default, ATEN.silu_.default)
    if silu is not None:
        last = silu
        narrow = narrowing_cast(last)
        if narrow is not None:
            last, rounded = narrow, False
    dtype = last.meta["val"].dtype
    # A tensor with other readers must be computed completely.
    x, added = _split_added(uncast(x)) if len(x.users) == 1 else (uncast(x), None)
    arguments = (x, groups, uncast(weight), uncast(bias), eps, silu is not None, added)
    replace(last, torch.ops.onediff.group_norm.default, (*arguments, dtype, rounded))


def _split_added(x: Any) -> tuple[Any, Any]:
    """Split an image into the image and a summand [B or 1, C, 1, 1], or None for no summand.

    Such summands are a time embedding and a convolution's bias. The norm's kernel adds them at no
    cost; a separate sum reads and writes the whole image.
    """
    added = None
    if is_sum(x) and x.target is ATEN.add.Tensor and len(x.users) == 1:
        image, other = x.args
        if _per_channel(other) and not _per_channel(image):
            x, added = image, other
    if x.target is ATEN.conv2d.default and len(x.users) == 1:
        source, weight, bias, *rest = arguments_of(x, 7)
        if bias is not None:
            with x.graph.inserting_before(x):
                plain = x.graph.call_function(
                    ATEN.conv2d.default, (source, weight, None, *_without_trailing_none(rest))
                )
                column = x.graph.call_function(ATEN.view.default, (bias, [1, -1, 1, 1]))
            plain.meta["val"] = x.meta["val"]
            column.meta["val"] = bias.meta["val"].view(1, -1, 1, 1)
            if added is None:
                return plain, column
            with x.graph.inserting_after(max(added, column, key=position)):
                both = x.graph.call_function(ATEN.add.Tensor, (added, column))
            both.meta["val"] = added.meta["val"]
            return plain, both
    return x, added


def _per_channel(node: Any) -> bool:
    """Whether a tensor [B, C, 1, 1] has one value for all pixels of a channel."""
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 4
        and all(isinstance(size, int) and size == 1 for size in value.shape[2:])
    )


def _without_trailing_none(arguments: list[Any]) -> list[Any]:
    while arguments and arguments[-1] is None:
        arguments.pop()
    return arguments


def rewrite_layer_norm(node: Any) -> None:
    """Replace a LayerNorm with affine weights [C], and the residual sum before it."""
    x, shape, weight, bias, *rest = arguments_of(node, 6)
    value = x.meta["val"]
    if weight is None or bias is None or value.ndim != 3 or len(shape) != 1:
        return
    if value.dtype not in DTYPES or value.shape[-1] > 8192:
        return
    eps = rest[0] if rest and rest[0] is not None else 1e-5
    x, weight, bias = uncast(x), uncast(weight), uncast(bias)
    last = narrowing_cast(node) or node
    dtype = last.meta["val"].dtype
    added = _plain_sum(x)
    # Weights come first in a graph unless they are computed, for instance from fp8.
    if added is None or max(position(weight), position(bias)) > position(x):
        replace(last, torch.ops.onediff.layer_norm.default, (x, weight, bias, eps, dtype))
        return
    with node.graph.inserting_before(x):
        both = node.graph.call_function(
            torch.ops.onediff.add_layer_norm.default, (*added, weight, bias, eps, dtype)
        )
        total = node.graph.call_function(operator.getitem, (both, 0))
        normed = node.graph.call_function(operator.getitem, (both, 1))
    total.meta["val"], normed.meta["val"] = x.meta["val"], last.meta["val"]
    both.meta["val"] = (total.meta["val"], normed.meta["val"])
    x.replace_all_uses_with(total)
    last.replace_all_uses_with(normed)


def _plain_sum(node: Any) -> tuple[Any, Any] | None:
    """Return the summands of a node that adds two tensors of its own shape and type, or None."""
    if not is_sum(node):
        return None
    form = _dtype_and_shape(node)
    summands = tuple(a for a in node.args if isinstance(a, Node) and _dtype_and_shape(a) == form)
    return (summands[0], summands[1]) if len(summands) == 2 else None


def _dtype_and_shape(node: Any) -> object:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return (value.dtype, *(str(size) for size in value.shape))

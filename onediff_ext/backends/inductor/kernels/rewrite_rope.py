"""RoPE in real numbers: with the norm before it our kernel, else a swap of neighbours."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from onediff_ext.backends.inductor.kernels.fx_nodes import (
    ATEN,
    arguments_of,
    is_cast,
    only_user,
    replace,
)


def rewrite_rotated_pairs(node: Any) -> None:
    """Replace the stack [-b, a] of pairs [..., 2] of a and b.

    Where it turns a normed query or key, `rotary_norm` takes the place of both. Elsewhere it
    becomes the swap of each pair, times [-1, 1], which fuses with what reads it: Inductor writes
    a stack to memory half by half, with gaps, and a swap is another index to it.
    """
    pairs = _rotated_pairs(node)
    if pairs is not None and not _rewrite_normed(node, pairs):
        _swap(node, pairs)


def _rotated_pairs(node: Any) -> Any:
    """Return the node of the pairs, or None if the stack is another one."""
    parts, dim = arguments_of(node, 2)
    value = node.meta["val"]
    if len(parts) != 2 or dim not in (-1, value.ndim - 1):
        return None
    negative, first = parts
    if negative.target is not ATEN.neg.default:
        return None
    second = negative.args[0]
    if not all(isinstance(n, Node) and n.target is operator.getitem for n in (first, second)):
        return None
    unbind = first.args[0]
    if unbind is not second.args[0] or unbind.target is not ATEN.unbind.int:
        return None
    pairs, of_dim = arguments_of(unbind, 2)
    if of_dim not in (-1, value.ndim - 1) or (first.args[1], second.args[1]) != (0, 1):
        return None
    return pairs


def _swap(node: Any, pairs: Any) -> None:
    value = node.meta["val"]
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


@dataclass(frozen=True)
class _Norm:
    """An RMSNorm of heads [B, T, H, D] with a weight [D]."""

    x: Any
    weight: Any
    eps: float


def _rewrite_normed(node: Any, pairs: Any) -> bool:
    """Replace the norm, the join of text and image, and RoPE by one kernel; return whether."""
    x = pairs.args[0] if pairs.target in (ATEN.reshape.default, ATEN.view.default) else None
    if x is None or x.meta["val"].ndim != 4 or len(x.users) != 2:
        return False
    found = _turned(node, x)
    norms = _norms_of(x)
    if found is None or not norms:
        return False
    last, cos, sin = found
    tables = (cos, sin)
    if len(norms) == 1:
        (norm,) = norms
        arguments = (norm.x, norm.weight, norm.eps, *tables)
        replace(last, torch.ops.onediff.rotary_norm.default, arguments)
    else:
        text, image = norms
        if text.eps != image.eps:
            return False
        inputs = (text.x, image.x, text.weight, image.weight, text.eps)
        replace(last, torch.ops.onediff.joined_rotary_norm.default, (*inputs, *tables))
    return True


def _turned(node: Any, x: Any) -> tuple[Any, Any, Any] | None:
    """Follow x · cos + rotated · sin to its end: the cast back to x's type, cos and sin."""
    flat = only_user(node, ATEN.flatten.using_ints, ATEN.reshape.default, ATEN.view.default)
    wide = only_user(flat, ATEN.to.dtype) if flat is not None else None
    beside = [user for user in x.users if is_cast(user)]
    if wide is None or len(beside) != 1 or flat.meta["val"].ndim != 4:
        return None
    turned, kept = (only_user(each, ATEN.mul.Tensor) for each in (wide, beside[0]))
    if turned is None or kept is None:
        return None
    total = only_user(turned, ATEN.add.Tensor)
    last = only_user(total, ATEN.to.dtype) if total is not None else None
    if last is None or set(total.args) != {turned, kept} or total.kwargs:
        return None
    sin, cos = (_other(m, n) for m, n in ((turned, wide), (kept, beside[0])))
    value = x.meta["val"]
    channels = value.shape[-1]
    for table in (cos, sin):
        given = table.meta["val"] if isinstance(table, Node) else None
        if not isinstance(given, torch.Tensor) or given.dtype is not torch.float32:
            return None
        if given.ndim != 4 or (given.shape[0], given.shape[2], given.shape[3]) != (1, 1, channels):
            return None
    wides = (wide.meta["val"].dtype, beside[0].meta["val"].dtype)
    if wides != (torch.float32, torch.float32) or last.meta["val"].dtype is not value.dtype:
        return None
    return last, cos, sin


def _other(product: Any, factor: Any) -> Any:
    """Return a product's other factor, or None if it has none."""
    others = [argument for argument in product.args if argument is not factor]
    return others[0] if len(others) == 1 and not product.kwargs else None


def _norms_of(x: Any) -> list[_Norm]:
    """Return the norm that makes x, the norms of text and image that it joins, or nothing."""
    parts, users = [x], 2
    if x.target is ATEN.cat.default:
        parts, dim = arguments_of(x, 2)
        users = 1
        if dim != 1 or len(parts) != 2:
            return []
    norms = [_norm(part) if len(part.users) == users else None for part in parts]
    return [norm for norm in norms if norm is not None] if all(norms) else []


def _norm(node: Any) -> _Norm | None:
    if node.target is not ATEN.rms_norm.default:
        return None
    x, shape, weight, eps = arguments_of(node, 4)
    value = x.meta["val"]
    channels = value.shape[-1]
    known = isinstance(channels, int) and channels.bit_count() == 1 and 16 <= channels <= 256
    if weight is None or eps is None or list(shape) != [channels] or not known:
        return None
    heads = value.shape[2] if value.ndim == 4 else None
    if not isinstance(heads, int) or heads * channels > 16384:
        return None
    if (
        value.dtype not in (torch.float16, torch.bfloat16)
        or weight.meta["val"].dtype != value.dtype
    ):
        return None
    return _Norm(x, weight, eps)

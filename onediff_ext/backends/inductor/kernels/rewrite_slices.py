"""Joined tokens that are cut apart again: each part is computed where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from onediff_ext.backends.inductor.kernels.fx_nodes import ATEN, arguments_of

_ELEMENTWISE: tuple[Callable[..., Any], ...] = (
    ATEN.add.Tensor,
    ATEN.mul.Tensor,
    ATEN.clamp.default,
    ATEN.clip.default,
)
_LARGEST = 2**63 - 1


def rewrite_sliced_sum(node: Any) -> None:
    """Replace a slice of sums and products by sums and products of slices.

    A block that joins text and image cuts its output apart at the end. Inductor writes the whole
    output and copies both parts; this way each part is written once.
    """
    x, dim, start, end, step = arguments_of(node, 5)
    if not isinstance(x, Node) or x.target not in _ELEMENTWISE or step not in (None, 1):
        return
    ndim = x.meta["val"].ndim
    dim = (dim or 0) % ndim
    if not dim or any(user.target is not ATEN.slice.Tensor for user in x.users):
        return
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(_cut(x, _Cut(dim - ndim, start, end), node.meta["val"]))


class _Cut(NamedTuple):
    """A slice of one dim.

    Args:
        axis: The dim, counted from the end, so that it holds for tensors with fewer dims too.
        start, end: Numbers or nodes, as in the slice.
    """

    axis: int
    start: Any
    end: Any

    def part_of(self, parts: list[Any]) -> Any:
        """Return the one of two joined tensors that this is, or None."""
        if len(parts) != 2:
            return None
        border = parts[0].meta["val"].shape[self.axis]
        if self.start in (None, 0) and _same(self.end, border):
            return parts[0]
        return parts[1] if _same(self.start, border) and self.end in (None, _LARGEST) else None


def _cut(x: Any, cut: _Cut, value: Any) -> Any:
    """Return the slice of a tensor as a node; `value` has its form."""
    graph, own = x.graph, x.meta["val"]
    if (
        x.target is ATEN.cat.default
        and (arguments_of(x, 2)[1] or 0) % own.ndim - own.ndim == cut.axis
    ):
        part = cut.part_of(list(x.args[0]))
        if part is not None:
            return part
    if x.target in _ELEMENTWISE:
        arguments = [_cut(a, cut, value) if _has_dim(a, cut.axis) else a for a in x.args]
        new = graph.call_function(x.target, tuple(arguments), dict(x.kwargs))
    else:
        dim = own.ndim + cut.axis
        new = graph.call_function(ATEN.slice.Tensor, (x, dim, cut.start, cut.end))
    new.meta["val"] = value
    return new


def _has_dim(argument: Any, axis: int) -> bool:
    """Whether an argument is a tensor with this dim, which is not broadcast."""
    value = argument.meta["val"] if isinstance(argument, Node) else None
    if not isinstance(value, torch.Tensor) or value.ndim < -axis:
        return False
    size = value.shape[axis]
    return not (isinstance(size, int) and size == 1)


def _same(node: Any, size: Any) -> bool:
    """Whether an argument of a slice is a size."""
    found = node.meta["val"] if isinstance(node, Node) else node
    return found is not None and str(found) == str(size)

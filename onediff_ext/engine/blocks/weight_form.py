"""The form of a weight: its class, dtype, shape and strides."""

from __future__ import annotations

import torch
from torch import nn

# What a graph assumes of a weight: dtype, shape, strides in elements.
Layout = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a weight has no Python code of its own, as subclasses of tensors have.

    Args:
        weight: Of any shape.
    """
    return type(weight) in (torch.Tensor, nn.Parameter)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie one after the other, in whichever order of its dims.

    Args:
        tensor: A strided one. Copies of it have the same strides then.
    """
    return tensor.is_contiguous() or (
        tensor.stride() == torch.empty_like(tensor, device="meta").stride()
    )


def layout_of(weight: torch.Tensor) -> Layout:
    """Return a weight's dtype, shape and strides.

    Args:
        weight: Of any shape.
    """
    return weight.dtype, weight.shape, weight.stride()


def converts_alike(source: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a GPU converts numbers to the same ones as a CPU does.

    Both round to the nearest number of a floating dtype of 16 bits or more, and 8 bits fit into it.

    Args:
        source: The numbers' dtype.
        wanted: The dtype that they are converted to.
    """
    return source == wanted or (
        source.is_floating_point and wanted.is_floating_point and wanted.itemsize >= 2
    )

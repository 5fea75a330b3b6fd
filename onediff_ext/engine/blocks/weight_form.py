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


def copies_alike(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a GPU that copies a tensor and converts the copy has the host's numbers.

    The host converts it in main memory first. Both round to the nearest number of a floating dtype
    of 16 bits or more, and 8 bits fit into it.

    Args:
        tensor: In main memory, of any shape.
        dtype: Of the copy.
    """
    floating = tensor.dtype.is_floating_point and dtype.is_floating_point
    return is_dense(tensor) and (tensor.dtype == dtype or (floating and dtype.itemsize >= 2))

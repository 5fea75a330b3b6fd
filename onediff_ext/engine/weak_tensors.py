"""Tensors that are remembered and may be freed all the same."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (type(None), torch.Tensor, nn.Parameter)


def is_made_of_others(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor has no memory of its own, but wraps others, as torchao's quantized ones do.

    Args:
        tensor: Any tensor; None is none.
    """
    return type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)


def parts_of(tensors: Iterable[torch.Tensor | None]) -> list[Any]:
    """Return tensors with their wrapped ones in the place of those that have no memory.

    torch moves a wrapping tensor by `torch.utils.swap_tensors`, which raises an error where
    somebody has a weak reference to it.

    Args:
        tensors: Of any classes; None stays.
    """
    found: list[Any] = []
    for tensor in tensors:
        if is_made_of_others(tensor):
            names, _ = tensor.__tensor_flatten__()  # type: ignore[union-attr]
            found += parts_of(getattr(tensor, name) for name in names)
        else:
            found.append(tensor)
    return found


class WeakTensors:
    """Remembers tensors without keeping them alive.

    A host that replaces weights, to merge a LoRA into them, frees the old ones one by one. On a
    GPU that the model fills, old weights that are kept leave no room for the new ones.

    Args:
        tensors: In an order that counts.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        lost: list[object] = []
        self._lost = lost
        self._references = [weakref.ref(tensor, lost.append) for tensor in tensors]

    def __len__(self) -> int:
        return len(self._references)

    def alive(self) -> list[torch.Tensor] | None:
        """Return all of them, or None when one was freed."""
        if self._lost:
            return None
        found = [reference() for reference in self._references]
        return None if any(map(operator.is_, found, repeat(None))) else found  # type: ignore[return-value]

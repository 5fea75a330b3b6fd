"""Tensors that are remembered and may be freed all the same."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from itertools import repeat

import torch


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

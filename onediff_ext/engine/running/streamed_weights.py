"""Blocks whose weights a host moves in at each call: they run eager while it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import Refusal

ELSEWHERE = "weights are on another device (offloading)"


def tree_refusal(tree: BlockTree) -> Refusal | None:
    """Say why no graph may replace a block, whatever its call is.

    Args:
        tree: The block as it is now.

    Returns:
        The refusal; None if a graph may replace it.
    """
    if tree.refusal_reason is None:
        return None
    if tree.changing is None:
        return Refusal(tree.refusal_reason)
    attributes, name = tree.changing
    return Refusal(tree.refusal_reason, still=lambda: bool(attributes.get(name)))


def device_refusal(
    tree: BlockTree, weights: Sequence[torch.Tensor], device: torch.device
) -> Refusal | None:
    """Say that a weight is on another device than the call.

    Args:
        tree: The block as it is now, without a refusal.
        weights: From `BlockTree.weights`.
        device: Of the call's tensors.

    Returns:
        The refusal; None if all weights are on that device.
    """
    for slot, weight in zip(tree.slots, weights, strict=True):
        if weight.device != device:
            still = partial(_is_elsewhere, slot.holder, slot.name, device)
            return Refusal(ELSEWHERE, still, is_known_code=True)
    return None


class KeptRefusal:
    """The refusal of a block's last call, which may hold for the next one.

    A host that moves weights in at each call does so for most blocks, and at each step. One lookup
    says that it still does.
    """

    def __init__(self) -> None:
        self._refusal: Refusal | None = None
        self._epoch: int | None = None

    def keep(self, refusal: Refusal, epoch: int) -> None:
        """Keep the refusal of a call.

        Args:
            refusal: Why the block ran eager.
            epoch: Of the call's image; see `KindRegistry.epoch`.
        """
        self._refusal, self._epoch = refusal, epoch

    def still(self, epoch: int) -> Refusal | None:
        """Return the refusal if it still holds, in the same image.

        Args:
            epoch: Of the present call's image.

        Returns:
            The refusal; None if the block has to be looked at.
        """
        last = self._refusal
        if last is None or last.still is None or self._epoch != epoch or not last.still():
            return None
        return last


def _is_elsewhere(holder: dict[str, Any], name: str, device: torch.device) -> bool:
    weight = holder.get(name)
    return weight is not None and weight.device != device

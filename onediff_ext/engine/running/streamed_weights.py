"""Weights that a host leaves in main memory: copies for a graph, or why the block runs eager."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockFamily, Refusal
from onediff_ext.engine.blocks.weight_slots import WeightSlot
from onediff_ext.engine.graph_calls import copy_weights
from onediff_ext.engine.memory_budget import MemoryBudget

ELSEWHERE = "weights are on another device (offloading)"
NO_ROOM = "no memory on the GPU for the weights that are in main memory (offloading)"

# The host copies one layer at a time, and a graph needs all of its block. So many bytes always fit:
# hosts leave several times as much for a step.
_FITS_BYTES = 128 * 2**20
# More may take up to this part of what is free.
_FREE_PART = 4


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


class StreamedWeights:
    """Copies a block's weights from main memory for one call of its graph.

    Args:
        family: The family of the block.
        budget: Tells how much memory is free on a GPU.

    Attributes:
        are_there: Whether the block of the last `refusal` has any.
    """

    def __init__(self, family: BlockFamily, budget: MemoryBudget) -> None:
        self._streams, self._budget = family.streams_weights, budget
        self._fitted: tuple[int, int] | None = None  # size in bytes, and the image's epoch
        self.are_there = False

    def refusal(
        self,
        tree: BlockTree,
        weights: Sequence[torch.Tensor],
        device: torch.device,
        epoch: int,
    ) -> Refusal | None:
        """Say why weights on another device than the call keep the block from its graph.

        Args:
            tree: The block as it is now, without a refusal.
            weights: From `BlockTree.weights`.
            device: Of the call's tensors.
            epoch: Of the call's image; see `KindRegistry.epoch`. Free memory is read once for it.

        Returns:
            The refusal; None if all weights are on that device, or can be copied to it.
        """
        self.are_there, size_bytes = False, 0
        first: WeightSlot | None = None
        for slot, weight in zip(tree.slots, weights, strict=True):
            if weight.device != device:
                first = first or slot
                if not self._streams or slot.is_wrapped or not weight.is_cpu:
                    return _refusal(ELSEWHERE, slot, device)
                size_bytes += weight.nbytes
        if first is None:
            return None
        if not self._fits(size_bytes, device, epoch):
            return _refusal(NO_ROOM, first, device)
        self.are_there = True
        return None

    def copied(
        self,
        weights: Sequence[torch.Tensor],
        device: torch.device,
        unread: Collection[int],
    ) -> list[torch.Tensor]:
        """Return the weights on the GPU.

        Args:
            weights: From `BlockTree.weights`.
            device: Of the call's tensors.
            unread: Indices of weights that the graph does not read: it gets others of their form.

        Returns:
            In the same order: weights that are there, and copies of the others.

        Raises:
            torch.OutOfMemoryError: There is no memory for the copies.
        """
        found = [
            torch.empty_like(weight, device=device) if i in unread else weight
            for i, weight in enumerate(weights)
        ]
        elsewhere = [i for i, weight in enumerate(found) if weight.device != device]
        copies = copy_weights([found[i] for i in elsewhere], device)
        for i, copied in zip(elsewhere, copies, strict=True):
            found[i] = copied
        return found

    def _fits(self, size_bytes: int, device: torch.device, epoch: int) -> bool:
        if size_bytes <= _FITS_BYTES or self._fitted == (size_bytes, epoch):
            return True
        free_bytes = self._budget.free_bytes(device, 0)
        if free_bytes is not None and size_bytes * _FREE_PART > free_bytes:
            return False
        self._fitted = size_bytes, epoch
        return True


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


def _refusal(reason: str, slot: WeightSlot, device: torch.device) -> Refusal:
    still = partial(_is_elsewhere, slot.holder, slot.name, device)
    return Refusal(reason, still, is_known_code=True)


def _is_elsewhere(holder: dict[str, Any], name: str, device: torch.device) -> bool:
    weight = holder.get(name)
    return weight is not None and weight.device != device

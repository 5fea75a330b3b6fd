"""Weights that a graph gets copies of: those in main memory, and those with functions on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockFamily, Refusal
from onediff_ext.engine.blocks.weight_form import is_dense, layout_of
from onediff_ext.engine.blocks.weight_functions import LayerFunctions
from onediff_ext.engine.blocks.weight_slots import WeightSlot
from onediff_ext.engine.graph_calls import copy_weights, is_observed
from onediff_ext.engine.memory_budget import MemoryBudget
from onediff_ext.engine.out_of_memory import AllocationFailures, is_out_of_memory
from onediff_ext.engine.torch_versions import OutOfMemoryError

ELSEWHERE = "weights are on another device (offloading)"
CHANGING = "weights change at each call"
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
    module, name = tree.changing
    return Refusal(tree.refusal_reason, still=lambda: bool(vars(module).get(name)))


class StreamedWeights:
    """Copies a block's weights for one call of its graph, and applies layers' functions to them.

    A host copies a weight that is in main memory when its layer runs. Where a LoRA is not merged,
    it has functions that change the copy (`WeightFunctionRule`).

    Args:
        family: The family of the block.
        budget: Tells how much memory is free on a GPU.
    """

    def __init__(self, family: BlockFamily, budget: MemoryBudget) -> None:
        self._family, self._budget = family, budget
        self._fitted: tuple[int, int] | None = None  # size in bytes, and the image's epoch
        self._short_in: int | None = None  # the epoch in which memory ran out
        self._reshaped_in: int | None = None  # the one in which functions changed a weight's form

    def are_needed(
        self, tree: BlockTree, weights: Sequence[torch.Tensor], device: torch.device
    ) -> bool:
        """Return whether the graph needs copies of some weights.

        Args:
            tree: The block as it is now.
            weights: From `BlockTree.weights`.
            device: Of the call's tensors.
        """
        return tree.has_weight_functions or any(weight.device != device for weight in weights)

    def refusal(
        self,
        tree: BlockTree,
        weights: Sequence[torch.Tensor],
        like: torch.Tensor,
        epoch: int,
    ) -> Refusal | None:
        """Say why copies of weights cannot serve the block's graph.

        Args:
            tree: The block as it is now, without a refusal.
            weights: From `BlockTree.weights`; `are_needed` has returned True for them.
            like: The call's first tensor. Functions are applied in its dtype.
            epoch: Of the call's image; see `KindRegistry.epoch`. Free memory is read once for it.

        Returns:
            The refusal; None if they can be copied to that device.
        """
        pairs = list(zip(tree.slots, weights, strict=True))
        if (functions := _unknown_functions(pairs, like.dtype)) is not None:
            return Refusal(CHANGING, still=lambda: bool(functions.now))
        if tree.has_weight_functions and self._reshaped_in == epoch:
            return Refusal(CHANGING)
        device = like.device
        elsewhere = [(slot, weight) for slot, weight in pairs if weight.device != device]
        changed = [w for slot, w in pairs if slot.functions is not None and w.device == device]
        may_be_copied = all(map(is_dense, changed)) and all(
            self._family.streams_weights()
            and weight.is_cpu
            and is_dense(weight)
            and not slot.is_wrapped
            for slot, weight in elsewhere
        )
        size_bytes = sum(w.nbytes for w in (*changed, *(w for _, w in elsewhere)))
        if may_be_copied and self._fits(size_bytes, device, epoch):
            return None
        if not elsewhere:
            return Refusal(NO_ROOM if may_be_copied else CHANGING, is_known_code=True)
        slot, _ = elsewhere[0]
        still = partial(_is_elsewhere, slot.holder, slot.name, device)
        return Refusal(NO_ROOM if may_be_copied else ELSEWHERE, still, is_known_code=True)

    def copied(
        self,
        tree: BlockTree,
        weights: Sequence[torch.Tensor],
        device: torch.device,
        unread: Collection[int],
        epoch: int,
    ) -> list[torch.Tensor] | str:
        """Return the weights on the GPU, as the block's layers compute with them.

        Args:
            tree: The block as it is now.
            weights: From `BlockTree.weights`, after `refusal` has returned None.
            device: Of the call's tensors.
            unread: Indices of weights that the graph does not read: it gets others of their form.
            epoch: Of the call's image, which gets no copies any more once memory has run out.

        Returns:
            In the same order: weights that are there, and copies of the others. An eager reason if
            a function changes a weight's form, or if there is no memory for the copies: the block's
            own layers need it for one layer at a time.

        Raises:
            torch.OutOfMemoryError: Likewise, while a CUDA graph is being recorded.
        """
        try:
            found = [
                torch.empty_like(weight, device=device) if i in unread else weight
                for i, weight in enumerate(weights)
            ]
            elsewhere = [i for i, weight in enumerate(found) if weight.device != device]
            copies = copy_weights([found[i] for i in elsewhere], device)
            for i, copied in zip(elsewhere, copies, strict=True):
                found[i] = copied
            if tree.has_weight_functions:
                _apply_functions(tree, found, weights, unread)
        except Exception as exc:
            if is_observed() or not is_out_of_memory(exc):
                raise
            self._short_in = epoch
            return NO_ROOM
        slots = zip(tree.slots, found, strict=True)
        if any(slot.functions and layout_of(weight) != slot.layout for slot, weight in slots):
            self._reshaped_in = epoch
            return CHANGING
        return found

    def _fits(self, size_bytes: int, device: torch.device, epoch: int) -> bool:
        if self._short_in == epoch:
            return False
        if size_bytes <= _FITS_BYTES or self._fitted == (size_bytes, epoch):
            return True
        free_bytes = self._budget.free_beside_pools(device)
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


def _apply_functions(
    tree: BlockTree,
    found: list[torch.Tensor],
    weights: Sequence[torch.Tensor],
    unread: Collection[int],
) -> None:
    """Apply layers' functions to weights that the graph reads, and put the results in their place.

    Args:
        tree: The block as it is now.
        found: The weights on the GPU.
        weights: The block's own: these must not be written to.
        unread: Indices of weights that the graph does not read.

    Raises:
        torch.OutOfMemoryError: There is no memory for it. Hosts write that to their log and go on
            with a weight that lacks the LoRA.
    """
    with AllocationFailures() as failures:
        for i, slot in enumerate(tree.slots):
            if slot.functions is not None and i not in unread:
                copied = found[i] if found[i] is not weights[i] else found[i].clone()
                found[i] = slot.functions.apply(copied)
    if failures.seen:
        raise OutOfMemoryError("Memory ran out in a function on a weight.")


def _unknown_functions(
    weights: Sequence[tuple[WeightSlot, torch.Tensor]], dtype: torch.dtype
) -> LayerFunctions | None:
    """The first functions on a weight that cannot be applied to a copy of it."""
    for slot, weight in weights:
        functions = slot.functions
        if functions is not None and not (
            functions.are_known() and weight.dtype == dtype and not slot.is_wrapped
        ):
            return functions
    return None


def _is_elsewhere(holder: dict[str, Any], name: str, device: torch.device) -> bool:
    weight = holder.get(name)
    return weight is not None and weight.device != device

"""One call of a model as two: half of the batch for the model, half for its replica."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onediff_ext.engine.cuda_graphs.argument_containers import ArgumentContainers
from onediff_ext.engine.cuda_graphs.half_batches import batch_of, has_rows, joined
from onediff_ext.engine.running.text_kv import stamp_of

NOTHING_TO_SPLIT = "the batch cannot be split: one picture without guidance, or other arguments"


@dataclass(frozen=True, eq=False)
class Half:
    """A call with half of the batch.

    Args:
        args, kwargs: Of the call.
        containers: The lists and dictionaries among them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    containers: ArgumentContainers


class CallHalves:
    """Splits the calls of one model.

    Pictures of diffusers put the negative prompt first. The first half goes to the other device,
    so latents and results cross once a step each.

    The halves of a tensor that is passed at each step, such as the prompt, are made once: who
    keeps something for a prompt, keeps it for the tensor.
    """

    def __init__(self) -> None:
        # By place among the arguments: the tensor, what it was, and its halves.
        self._kept: dict[
            int, tuple[weakref.ref[torch.Tensor], Hashable, torch.Tensor, torch.Tensor]
        ] = {}

    def split(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        here: torch.device,
        there: torch.device,
        epoch: Hashable,
    ) -> tuple[Half, Half] | None:
        """Split one call.

        Args:
            args, kwargs: Of the call.
            here, there: The devices of the model and of its replica.
            epoch: As `KindRegistry.epoch`.

        Returns:
            The replica's half and the model's; None when the batch cannot be halved.
        """
        leaves, structure = pytree.tree_flatten((tuple(args), kwargs))
        batch = batch_of(leaves)
        if batch is None:
            return None
        theirs, mine = [], []
        for place, leaf in enumerate(leaves):
            first, second = leaf, leaf
            if isinstance(leaf, torch.Tensor):
                first, second = self._halves(place, leaf, batch, here, there, epoch)
            theirs.append(first)
            mine.append(second)
        return _half(theirs, structure), _half(mine, structure)

    def forget(self) -> None:
        """Free the halves of all tensors."""
        self._kept.clear()

    def _halves(
        self,
        place: int,
        tensor: torch.Tensor,
        batch: int,
        here: torch.device,
        there: torch.device,
        epoch: Hashable,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stamp = (stamp_of(epoch, tensor, ()), there)
        known = self._kept.get(place)
        if known is not None and known[0]() is tensor and known[1] == stamp and stamp[0]:
            return known[2], known[3]
        first = second = tensor
        if has_rows(tensor, batch):
            first, second = tensor[: batch // 2], tensor[batch // 2 :]
        if tensor.device == here:
            first = first.to(there, non_blocking=True)
        self._kept[place] = (weakref.ref(tensor), stamp, first, second)
        return first, second


def joined_on(device: torch.device, theirs: Any, mine: Any) -> Any:
    """Return both halves' outputs as one, on a device.

    Args:
        device: The model's.
        theirs, mine: Outputs of the replica and of the model.
    """
    moved = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), theirs)
    return joined(moved, mine)


def _half(leaves: list[Any], structure: pytree.TreeSpec) -> Half:
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return Half(tuple(args), dict(kwargs), ArgumentContainers(args, kwargs))

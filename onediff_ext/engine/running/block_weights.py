"""The weights that one block's graph reads: the block's own, merged ones, 8-bit copies."""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch

from onediff_ext.core.errors import ModelChangedError
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.kind_registry import KindRegistry
from onediff_ext.engine.blocks.weight_slots import WeightSlot
from onediff_ext.engine.memory_budget import DerivedWeights
from onediff_ext.engine.quantization import Quantization, QuantizedWeights

_MERGED = operator.attrgetter("merged")


class BlockWeights(DerivedWeights):
    """Reads one block's weights at each call.

    Merged weights (a LoRA) and 8-bit copies are *derived*: computed from other weights, kept at one
    address and written again there when their sources change. CUDA graphs read them.

    Args:
        registry: Watches the sources of derived weights.

    Attributes:
        tree: The block they belong to; None before the first call.
        wrapped_slots: The weights that a wrapper decides.
    """

    def __init__(self, registry: KindRegistry) -> None:
        self._registry = registry
        registry.budget.derived.add(self)
        self.tree: BlockTree | None = None
        self.wrapped_slots: list[WeightSlot] = []
        self._quantized: QuantizedWeights | None = None

    def use(self, tree: BlockTree) -> None:
        """Read the weights of this tree from now on.

        Args:
            tree: The block as it is now.
        """
        self.tree = tree
        self.wrapped_slots = [slot for slot in tree.slots if slot.is_wrapped]
        for slot in self.wrapped_slots:
            slot.on_merge = self._registry.contents.watch

    def read(self, tree: BlockTree) -> list[torch.Tensor] | None:
        """Return the weights of a tree in the order of `BlockTree.names`, with wrappers merged.

        Args:
            tree: The block as it was when it was read last.

        Returns:
            The weights; None when their form has changed since the tree was made.

        Raises:
            ModelChangedError: A CUDA graph is being recorded, and a weight has to be merged.
        """
        return tree.weights(self.generation)

    def current(self) -> list[torch.Tensor]:
        """Return the weights that the last call's graph read, as they are now.

        Raises:
            ModelChangedError: The weights no longer have the form that the graph reads.
        """
        weights = None if self.tree is None else self.read(self.tree)
        if weights is None:
            raise ModelChangedError("A block has other weights than it had a moment ago.")
        return weights

    def for_graph(
        self, weights: list[torch.Tensor], quantization: Quantization | None
    ) -> list[torch.Tensor]:
        """Return the weights as a kind's graph takes them.

        Args:
            weights: From `read`.
            quantization: Which of them are 8-bit copies in the graph; None for none.

        Returns:
            `weights`, or with 8-bit copies the list that `QuantizedWeights.apply` describes.
        """
        if quantization is None:
            self._quantized = None
            return weights
        if self._quantized is None or self._quantized.quantization != quantization:
            self._quantized = QuantizedWeights(quantization)
        taken = self._quantized.apply(weights, self.generation)
        if self._quantized.was_made:
            assert self.tree is not None
            slots = zip(self.tree.slots, weights, strict=True)
            self._registry.contents.watch(
                weight for slot, weight in slots if not slot.is_wrapped and weight.ndim > 1
            )
        return taken

    @property
    def generation(self) -> int:
        """`TensorContents.current_generation` of this image."""
        return self._registry.contents.current_generation(self._registry.epoch)

    @property
    def has_derived(self) -> bool:
        """Whether the graph reads weights that were computed from others."""
        return self._quantized is not None or bool(self.wrapped_slots)

    def derived_from_now(self) -> Hashable:
        """Identify what the derived weights would be computed from now."""
        generation = self.generation
        return (
            tuple(slot.would_be_made_from(generation) for slot in self.wrapped_slots),
            None if self._quantized is None else self._quantized.would_be_made_from(generation),
        )

    def derived_from(self) -> Hashable:
        """Identify what the derived weights were last computed from."""
        return (
            tuple(slot.made_from for slot in self.wrapped_slots),
            None if self._quantized is None else self._quantized.made_from,
        )

    def derived_parts(self) -> tuple[object, ...]:
        """Return objects that are others after the derived weights were computed again.

        Merged weights are left out: `WeightSlot.made_from` is such an object for each.
        """
        copies = self._quantized
        if copies is None:
            return (self.wrapped_slots, None)
        return self.wrapped_slots, copies, copies.sources, copies.made_from

    def derived_sources(self) -> list[torch.Tensor]:
        """Return the tensors whose contents `derived_from_now` reads."""
        found = [tensor for slot in self.wrapped_slots for tensor in slot.sources()]
        copied = None if self._quantized is None else self._quantized.sources.alive()
        return [*found, *(copied or ())]

    def merged_addresses(self) -> tuple[int, ...]:
        """Return the addresses of the merged weights; 0 for one that was not computed yet."""
        merged = map(_MERGED, self.wrapped_slots)
        return tuple([0 if weight is None else weight.data_ptr() for weight in merged])

    def derived_bytes(self) -> int:
        merged = [slot.merged for slot in self.wrapped_slots]
        copies = 0 if self._quantized is None else self._quantized.size_bytes
        return copies + sum(w.numel() * w.element_size() for w in merged if w is not None)

    def lie_elsewhere(self) -> bool:
        if self.tree is None:
            return False
        for slot in self.wrapped_slots:
            weight, merged = slot.unmerged(), slot.merged
            if weight is not None and merged is not None and weight.device != merged.device:
                return True
        device = None if self._quantized is None else self._quantized.device
        weights = [slot.unmerged() for slot in self.tree.slots]
        return device is not None and any(w is not None and w.device != device for w in weights)

    def release(self) -> None:
        for slot in self.wrapped_slots:
            slot.release()
        if self._quantized is not None:
            self._quantized.release()

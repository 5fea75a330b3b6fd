"""The text KV cache of one block: keys and values of a prompt, computed once for all steps."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import nn

from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall, BlockFamily
from onediff_ext.engine.blocks.kind_registry import KindRegistry
from onediff_ext.engine.running.block_weights import BlockWeights
from onediff_ext.engine.torch_versions import autocast_dtype
from onediff_ext.engine.validity.tensor_contents import content_of, version_of

_VERSION = operator.itemgetter(-1)


class TextKv:
    """Keys and values that a block's `prompt_layers` made of a prompt.

    They serve the steps of one image: for the same prompt tensor and the same weights, neither
    written since.

    Args:
        prompt: The prompt, [B, M, C].
        tensors: Keys and values, [B, M, D] each.
        stamp: From `stamp_of`. With None a change would not be noticed, so they serve one call.
        weights: The weights of the layers that made them.
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        stamp: Hashable,
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._prompt, self.tensors, self._stamp = weakref.ref(prompt), tensors, stamp
        # Weak: a host may have given the weights up for another checkpoint's.
        self._weights = [weakref.ref(weight) for weight in weights]

    @property
    def prompt(self) -> torch.Tensor | None:
        """The prompt, while the tensor lives."""
        return self._prompt()

    def serves(
        self, prompt: torch.Tensor, stamp: Hashable, weights: Sequence[torch.Tensor]
    ) -> bool:
        """Return whether these weights would make the same of this prompt now.

        Args:
            prompt: The prompt of a call, [B, M, C].
            stamp: From `stamp_of`, for the call.
            weights: The weights that the `prompt_layers` have now.
        """
        return (
            stamp is not None
            and stamp == self._stamp
            and self._prompt() is prompt
            and len(weights) == len(self._weights)
            and all(known() is weight for known, weight in zip(self._weights, weights, strict=True))
        )


class PinnedTextKv(TextKv):
    """Keys and values that serve one prompt tensor whatever is written to it.

    While a CUDA graph is recorded, the prompt is the graph's static buffer, and the graph's owner
    keeps the keys and values up to date.

    Args:
        prompt: The static buffer, [B, M, C].
        tensors: Keys and values, [B, M, D] each.
    """

    def __init__(self, prompt: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__(prompt, tensors, None, ())

    def serves(
        self,
        prompt: torch.Tensor,
        stamp: Hashable,  # noqa: ARG002
        weights: Sequence[torch.Tensor],  # noqa: ARG002
    ) -> bool:
        return self._prompt() is prompt


class BlockTextKv:
    """Computes one block's keys and values ahead of its graph, and keeps the last ones.

    Args:
        block: The host's module.
        family: The family of the block.
        weights: Reads the block's weights.
        registry: Tells when weights may have been written.

    Attributes:
        layers: Indices of the weights that the prompt's layers read.
        has_functions: Whether these layers apply functions to their weights. Nobody would notice
            that what they do has changed.
        cached: The keys and values of the last call with a graph.
    """

    def __init__(
        self, block: nn.Module, family: BlockFamily, weights: BlockWeights, registry: KindRegistry
    ) -> None:
        self._block, self._family = block, family
        self._weights, self._registry = weights, registry
        self.layers: tuple[int, ...] = ()
        # The prompt's layers that have a wrapper → indices of their weight and bias.
        self._wrapped: dict[str, tuple[int, int | None]] = {}
        self.has_functions = False
        self.cached: TextKv | None = None

    def use(self, tree: BlockTree) -> None:
        """Find the weights of the prompt's layers in this tree.

        Args:
            tree: The block as it is now.
        """
        prefixes = tuple(f"{name}." for name in self._family.prompt_layers)
        self.layers = tuple(
            i for i, name in enumerate(tree.names) if prefixes and name.startswith(prefixes)
        )
        index = {tree.names[i]: i for i in self.layers}
        self.has_functions = any(tree.slots[i].functions is not None for i in self.layers)
        self._wrapped = {
            layer: (index[f"{layer}.weight"], index.get(f"{layer}.bias"))
            for layer in self._family.prompt_layers
            if f"{layer}.weight" in index and tree.slots[index[f"{layer}.weight"]].is_wrapped
        }

    def graph_call(self, call: BlockCall, weights: Sequence[torch.Tensor]) -> BlockCall:
        """Return a call as its graph takes it, with keys and values in place of the prompt.

        Args:
            call: The host's call.
            weights: All weights of the block.
        """
        prompt = call.prompt
        if prompt is None:
            return call
        read = [weights[i] for i in self.layers]
        stamp = None if self.has_functions else stamp_of(self._registry.epoch, prompt, read)
        known = self.cached
        if known is None or not known.serves(prompt, stamp, read):
            known = self.cached = TextKv(prompt, self._compute(prompt, weights), stamp, read)
        return self._family.with_text_kv(call, known.tensors)

    def compute(self, prompt: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute keys and values of a prompt with the weights as they are now.

        Args:
            prompt: [B, M, C].

        Returns:
            Keys and values, [B, M, D] each.

        Raises:
            ModelChangedError: The weights no longer have the form that the graph reads.
        """
        return self._compute(prompt, self._weights.current())

    def layer_weights(self) -> list[torch.Tensor]:
        """Return the weights that `compute` reads.

        Raises:
            ModelChangedError: The weights no longer have the form that the graph reads.
        """
        weights = self._weights.current()
        return [weights[i] for i in self.layers]

    def _compute(
        self, prompt: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        merged = {
            layer: (weights[weight], None if bias is None else weights[bias])
            for layer, (weight, bias) in self._wrapped.items()
        }
        return self._family.text_kv(self._block, prompt, merged)


def stamp_of(
    epoch: Hashable, prompt: torch.Tensor, weights: Sequence[torch.Tensor]
) -> Hashable | None:
    """Identify what keys and values are computed from.

    Args:
        epoch: As `KindRegistry.epoch`.
        prompt, weights: The tensors that they are computed from.

    Returns:
        A value that differs when a tensor was written in place or autocast changed. None when a
        write would not be noticed: tensors made under inference mode count none.
    """
    if weights and version_of(weights[0]) < 0:  # so are the others, most likely
        return None
    contents = [content_of(tensor) for tensor in (prompt, *weights)]
    if min(map(_VERSION, contents)) < 0:
        return None
    return (epoch, autocast_dtype(prompt.device.type), *contents)

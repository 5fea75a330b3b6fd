"""The weights that a block computes with: the host's own, and those that a wrapper merges."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.core.errors import ModelChangedError
from onediff_ext.engine.blocks.weight_form import Layout, layout_of
from onediff_ext.engine.blocks.weight_functions import LayerFunctions
from onediff_ext.engine.graph_calls import is_observed


class WrapperRule(ABC):
    """Expresses modules that wrap a layer and change its weight, such as LoRA layers."""

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Return whether a module is such a wrapper.

        Args:
            module: Any module of a block.
        """

    @abstractmethod
    def base(self, module: nn.Module) -> nn.Module:
        """Return the wrapped layer. The block's graph is that of the bare layer.

        Args:
            module: The wrapper.
        """

    def around(self, module: nn.Module) -> list[nn.Module]:
        """Return the wrapper's own modules, without the layer.

        Args:
            module: The wrapper.
        """
        layer = self.base(module)
        return [each for each in module.modules() if each is not layer]

    @abstractmethod
    def refusal_reason(self, module: nn.Module) -> str | None:
        """Say why another weight cannot express this wrapper, or None.

        Args:
            module: The wrapper.

        Returns:
            The eager reason of the wrapper's block, in plain words.
        """

    @abstractmethod
    def state(self, module: nn.Module) -> Hashable:
        """Return a value that differs when `merged_weight` would return something else.

        Writes that torch does not count, such as those through ``.data``, are left to
        `TensorContents`. It may read attributes of the wrapper's modules, which modules and
        Parameters they have, and `content_of` the layer's weight and of `sources`: `DerivedStamp`
        looks at these.

        Args:
            module: The wrapper.
        """

    @abstractmethod
    def sources(self, module: nn.Module) -> Sequence[torch.Tensor]:
        """Return the tensors that `merged_weight` reads.

        Args:
            module: The wrapper.

        Returns:
            The layer's weight and the wrapper's; empty while the wrapper changes nothing.
        """

    def scales(self, module: nn.Module) -> dict[str, Any]:  # noqa: ARG002
        """Return the dictionary of a wrapper's scales, which a forward may change for its time.

        Args:
            module: The wrapper.

        Returns:
            Numbers or tensors by name, the wrapper's own dictionary; empty if it has none.
        """
        return {}

    @abstractmethod
    def merged_weight(
        self, module: nn.Module, weight: torch.Tensor, allocate: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return the weight with which the bare layer computes what the wrapper computes.

        Args:
            module: The wrapper.
            weight: The bare layer's weight.
            allocate: Returns the tensor to write the result into, of the weight's dtype, shape
                and strides.

        Returns:
            `weight` itself where the wrapper changes nothing, otherwise what `allocate` returned.
        """


def rule_of(module: nn.Module, rules: Sequence[WrapperRule]) -> WrapperRule | None:
    """Return the rule of a wrapper; None for any other module.

    Args:
        module: Any module.
        rules: The rules to try, in this order.
    """
    return next((rule for rule in rules if rule.matches(module)), None)


class WeightSlot:
    """One weight of a block. It is read at every call, since hosts replace Parameters.

    A merged weight stays at one address. It is written again there when its wrapper changes, so
    that CUDA graphs which read it stay right.

    Args:
        path: Full name within the block.
        holder: The dictionary of the module that has the weight.
        name: The weight's name in `holder`.
        wrapped: The rule and the wrapper that decide the weight, if any.
        functions: What the layer applies to the weight at each call, if anything.

    Attributes:
        functions: As given. `read` returns the weight without them.
        layout: The layout that graphs are built for; None until the block is described.
        made_from: Identifies what the merged weight was computed from; None without a wrapper.
        merged: The last merged weight; None before and without a wrapper.
        on_merge: Called with the source tensors after a merged weight was written.
    """

    __slots__ = (
        *("_exchanges", "_last", "_wrapped"),
        *("functions", "holder", "layout", "made_from", "merged", "name", "on_merge", "path"),
    )

    def __init__(
        self,
        path: str,
        holder: dict[str, Any],
        name: str,
        wrapped: tuple[WrapperRule, nn.Module] | None,
        functions: LayerFunctions | None = None,
    ) -> None:
        self.path, self.holder, self.name, self._wrapped = path, holder, name, wrapped
        self.functions = functions
        self.merged: torch.Tensor | None = None
        # The tensors that were read last, and how often they were others: a new one may lie at the
        # address of an old one.
        self._last: list[weakref.ref[torch.Tensor]] = []
        self._exchanges = 0
        self.layout: Layout | None = None
        self.made_from: Hashable = None
        self.on_merge: Callable[[Sequence[torch.Tensor]], None] | None = None

    @property
    def is_wrapped(self) -> bool:
        """Whether a wrapper decides the weight."""
        return self._wrapped is not None

    @property
    def wrapper(self) -> nn.Module | None:
        """The wrapper that decides the weight, if any."""
        return None if self._wrapped is None else self._wrapped[1]

    def wrapper_modules(self) -> list[nn.Module]:
        """Return the wrapper and what it brought; empty without one."""
        return [] if self._wrapped is None else self._wrapped[0].around(self._wrapped[1])

    def sources(self) -> list[torch.Tensor]:
        """Return the tensors that the wrapper's state is read from; empty without one."""
        weight = self.unmerged()
        if self._wrapped is None or weight is None:
            return []
        rule, wrapper = self._wrapped
        return [weight, *rule.sources(wrapper)]

    def unmerged(self) -> torch.Tensor | None:
        """Return the host's own weight, which has the merged weight's layout."""
        return self.holder.get(self.name)

    def would_be_made_from(self, generation: int) -> Hashable:
        """Return what `made_from` would be if the weight were read now.

        Args:
            generation: From `TensorContents.current_generation`.
        """
        tensors, last = self.sources(), self._last
        if self._wrapped is None or not tensors:
            return None
        if len(last) != len(tensors) or any(
            known() is not tensor for known, tensor in zip(last, tensors, strict=True)
        ):
            self._last, self._exchanges = list(map(weakref.ref, tensors)), self._exchanges + 1
        rule, wrapper = self._wrapped
        return (generation, self._exchanges, rule.state(wrapper))

    def release(self) -> None:
        """Free the merged weight; the next `read` merges again."""
        self.merged, self.made_from = None, None

    def read(self, generation: int) -> torch.Tensor | None:
        """Return the weight as it is now.

        Args:
            generation: From `TensorContents.current_generation`.

        Returns:
            The weight; None when it is gone or its wrapper can no longer be merged.

        Raises:
            ModelChangedError: A CUDA graph is being recorded, and the weight has to be merged.
        """
        weight: torch.Tensor | None = self.holder.get(self.name)
        if weight is None or self._wrapped is None:
            return weight
        rule, wrapper = self._wrapped
        made_from = self.would_be_made_from(generation)
        if self.merged is None or made_from != self.made_from:
            if rule.refusal_reason(wrapper) is not None:
                return None
            if is_observed():
                raise ModelChangedError("A weight has changed since the forward before it.")
            self.made_from = None  # stays None when the merge fails halfway
            self.merged = rule.merged_weight(wrapper, weight, lambda: self._allocate(weight))
            self.made_from = made_from
            if self.on_merge is not None:
                self.on_merge(rule.sources(wrapper))
        return self.merged

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return the last merged tensor where it fits, otherwise a new one."""
        kept = self.merged
        if (
            kept is not None
            and kept is not like
            and layout_of(kept) == layout_of(like)
            and kept.device == like.device
            and kept.untyped_storage().data_ptr() != like.untyped_storage().data_ptr()
        ):
            return kept
        with torch.inference_mode(False):  # inference tensors can't be written to outside of it
            return torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )

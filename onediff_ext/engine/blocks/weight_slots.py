"""The weights that a block computes with: the host's own, or those that a wrapper makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.core.errors import WeightsChangedError
from onediff_ext.engine.graph_calls import is_observed

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def layout_of(weight: torch.Tensor) -> Layout:
    """What a graph takes for granted of a weight: dtype, shape and strides."""
    return weight.dtype, weight.shape, weight.stride()


class WrapperRule(ABC):
    """A module that stands around another one and changes its weight, as LoRA layers do."""

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is such a wrapper."""

    @abstractmethod
    def base(self, module: nn.Module) -> nn.Module:
        """The wrapped module, whose graph serves."""

    @abstractmethod
    def refusal_reason(self, module: nn.Module) -> str | None:
        """Why this wrapper cannot be expressed as another weight, or None."""

    @abstractmethod
    def state(self, module: nn.Module) -> Hashable:
        """A value that differs whenever `effective` would return something else, except for what
        was written into tensors without a trace."""

    @abstractmethod
    def sources(self, module: nn.Module) -> Sequence[torch.Tensor]:
        """The tensors that `effective` reads."""

    @abstractmethod
    def effective(
        self, module: nn.Module, weight: torch.Tensor, room: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The weight with which the bare base computes what the wrapper computes.

        Args:
            module: The wrapper.
            weight: Of its base.
            room: A tensor of the weight's form to write the result into.

        Returns:
            `weight` itself where the wrapper changes nothing, else what `room` returned.
        """


class WeightSlot:
    """One weight of a block, read at every call since hosts replace Parameters.

    A weight that a wrapper makes has one place, and is made again there when the wrapper changes:
    CUDA graphs that read it go on being right.

    Args:
        path: Full name within the block.
        holder: The module's dictionary that has it.
        name: Its name there.
        wrapped: By which wrapper, if any.

    Attributes:
        layout: What a graph takes for granted; None until it was described.
        made_from: Of what a wrapper's weight was made; None for others.
        changed: Called after a wrapper's weight was written, with what it was made of.
    """

    __slots__ = ("_value", "_wrapped", "changed", "holder", "layout", "made_from", "name", "path")

    def __init__(
        self,
        path: str,
        holder: dict[str, Any],
        name: str,
        wrapped: tuple[WrapperRule, nn.Module] | None,
    ) -> None:
        self.path, self.holder, self.name, self._wrapped = path, holder, name, wrapped
        self._value: torch.Tensor | None = None
        self.layout: Layout | None = None
        self.made_from: Hashable = None
        self.changed: Callable[[Sequence[torch.Tensor]], None] | None = None

    @property
    def is_wrapped(self) -> bool:
        """Whether a wrapper decides what it is."""
        return self._wrapped is not None

    def outline(self) -> torch.Tensor | None:
        """The weight, or another one of the same form."""
        return self.holder.get(self.name)

    def would_be_made_from(self, generation: int) -> Hashable:
        """What `made_from` would be if the weight were read now."""
        if self._wrapped is None:
            return None
        rule, wrapper = self._wrapped
        return (generation, rule.state(wrapper))

    def place(self) -> int:
        """The address of what was read last from a wrapper, or 0."""
        return 0 if self._value is None else self._value.data_ptr()

    def read(self, generation: int) -> torch.Tensor | None:
        """The weight as it is now; None if there is none, or it can't be a weight any more.

        Args:
            generation: Of `TensorContents`.
        """
        weight: torch.Tensor | None = self.holder.get(self.name)
        if weight is None or self._wrapped is None:
            return weight
        rule, wrapper = self._wrapped
        made_from = (generation, rule.state(wrapper))
        if self._value is None or made_from != self.made_from:
            if rule.refusal_reason(wrapper) is not None:
                return None
            if is_observed():
                raise WeightsChangedError("A weight has changed since the forward before it.")
            self.made_from = None  # nothing is known until all of it has happened
            self._value = rule.effective(wrapper, weight, lambda: self._room(weight))
            self.made_from = made_from
            if self.changed is not None:
                self.changed(rule.sources(wrapper))
        return self._value

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        kept = self._value
        if (
            kept is not None
            and kept is not like
            and layout_of(kept) == layout_of(like)
            and kept.device == like.device
            and kept.untyped_storage().data_ptr() != like.untyped_storage().data_ptr()
        ):
            return kept
        with torch.inference_mode(False):  # or it could not be written outside of it
            return torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )

"""Functions that a host's layer applies to its weight at each call, such as those of a LoRA."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WeightFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FunctionState:
    """What decides the result of a function, besides the numbers in its tensors.

    Args:
        values: Numbers and names; they are compared.
        objects: The tensors that it reads, and what holds them. Another object counts as a change.
    """

    values: tuple[Hashable, ...]
    objects: tuple[object, ...]


class WeightFunctionRule(ABC):
    """Knows the functions that a host's layers apply to their weights at each call.

    Attributes:
        attributes: Names of the weights → names of the layer's attributes with their functions.
    """

    attributes: Mapping[str, str]

    @abstractmethod
    def is_known(self, function: object) -> bool:
        """Return whether a function may be applied to a copy of the weight.

        It may write to its argument, which nobody else reads then. It depends on the weight and on
        what the host gave it.

        Args:
            function: From one of the `attributes`.
        """

    @abstractmethod
    def state(self, function: Any) -> FunctionState | None:
        """Return what decides a function's result.

        Args:
            function: A known one.

        Returns:
            The state; None if a CUDA graph must not contain the function.
        """


class LayerFunctions:
    """The functions that a layer applies to one of its weights, read at each call.

    Args:
        layer: Whose weight it is.
        attribute: Its attribute with the functions.
        rule: Knows them.
    """

    __slots__ = ("_attribute", "_attributes", "_rule")

    def __init__(self, layer: nn.Module, attribute: str, rule: WeightFunctionRule) -> None:
        self._attributes, self._attribute, self._rule = vars(layer), attribute, rule

    @property
    def now(self) -> Sequence[WeightFunction]:
        """The functions, in their order; empty for none."""
        return self._attributes.get(self._attribute) or ()

    def are_known(self) -> bool:
        """Return whether all functions are known."""
        return all(map(self._rule.is_known, self.now))

    def states(self) -> list[FunctionState] | None:
        """Return the state of each function; None if a CUDA graph must not contain one."""
        found = []
        for function in self.now:
            state = self._rule.state(function) if self._rule.is_known(function) else None
            if state is None:
                return None
            found.append(FunctionState(state.values, (function, *state.objects)))
        return found

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight that the layer computes with.

        Args:
            weight: A copy of the layer's weight, in the dtype of the layer's input. It may be
                written to.
        """
        for function in self.now:
            weight = function(weight)
        return weight


def functions_of(
    layer: nn.Module, rules: Iterable[WeightFunctionRule]
) -> dict[str, LayerFunctions]:
    """Return the functions that a layer applies to its weights now.

    Args:
        layer: Any module.
        rules: Those of its host.

    Returns:
        By the weight's name. Some functions may be unknown.
    """
    return {
        weight: LayerFunctions(layer, attribute, rule)
        for rule in rules
        for weight, attribute in rule.attributes.items()
        if vars(layer).get(attribute)
    }


def known_attributes(layer: nn.Module, rules: Iterable[WeightFunctionRule]) -> set[str]:
    """Return the attributes of a layer whose functions are all known.

    Args:
        layer: Any module.
        rules: Those of its host.
    """
    return {
        attribute
        for rule in rules
        for weight, attribute in rule.attributes.items()
        if layer._parameters.get(weight) is not None
        and all(map(rule.is_known, vars(layer).get(attribute) or ()))
    }


class FrozenFunctions:
    """The functions of a model's layers at one moment, for a CUDA graph that contains them.

    It keeps none of their tensors alive.

    Args:
        layers: Layers of the model.
        rules: Those of the host.

    Attributes:
        is_known: Whether a CUDA graph may contain all functions.
        classes: Of the functions and of what they call, whose code a CUDA graph contains.
    """

    def __init__(self, layers: Iterable[nn.Module], rules: Sequence[WeightFunctionRule]) -> None:
        self._functions = [f for layer in layers for f in functions_of(layer, rules).values()]
        states = self._states()
        self.is_known = states is not None
        values, objects = states or ([], [])
        self._values, self._objects = values, list(map(weakref.ref, objects))
        self.classes = {type(each) for each in objects if not isinstance(each, torch.Tensor)}

    def hold(self) -> bool:
        """Return whether the same functions are there, and do the same."""
        if not self._functions:
            return True
        states = self._states()
        if states is None or not self.is_known:
            return False
        values, objects = states
        return (
            values == self._values
            and len(objects) == len(self._objects)
            and all(then() is now for then, now in zip(self._objects, objects, strict=True))
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the functions read, as long as somebody keeps them."""
        alive = (reference() for reference in self._objects)
        return [each for each in alive if isinstance(each, torch.Tensor)]

    def _states(self) -> tuple[list[Hashable], list[object]] | None:
        """The values and objects of all states, in order; None if one function has none."""
        values: list[Hashable] = []
        objects: list[object] = []
        for functions in self._functions:
            states = functions.states()
            if states is None:
                return None
            values.append(len(states))
            for state in states:
                values.append(state.values)
                objects += state.objects
        return values, objects

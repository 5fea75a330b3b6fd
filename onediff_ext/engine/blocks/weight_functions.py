"""Functions that a host's layer applies to its weight at each call, such as those of a LoRA."""

from __future__ import annotations

import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.weight_form import copies_alike

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

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the objects."""
        return [each for each in self.objects if isinstance(each, torch.Tensor)]


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

    @abstractmethod
    def code(self) -> Sequence[object] | None:
        """Return the host's code that the functions call, besides methods of their classes.

        Returns:
            Objects that are others after a part was replaced; None if it is not the host's own.
        """


class LayerFunctions:
    """The functions that a layer applies to one of its weights, read at each call.

    Args:
        layer: Whose weight it is.
        weight: The weight's name.
        rule: Knows the functions.
    """

    __slots__ = ("_attribute", "_attributes", "_parameters", "_rule", "_weight")

    def __init__(self, layer: nn.Module, weight: str, rule: WeightFunctionRule) -> None:
        self._attributes, self._attribute = vars(layer), rule.attributes[weight]
        self._parameters, self._weight, self._rule = layer._parameters, weight, rule

    @property
    def now(self) -> Sequence[WeightFunction]:
        """The functions, in their order; empty for none."""
        return self._attributes.get(self._attribute) or ()

    def are_known(self) -> bool:
        """Return whether all functions are known."""
        return all(map(self._rule.is_known, self.now))

    def states(self) -> list[FunctionState] | None:
        """Return the state of each function; None if a CUDA graph must not contain one.

        Tensors in main memory are copied at each replay, if it can convert the copies as the host
        does.
        """
        weight, found = self._parameters.get(self._weight), []
        for function in self.now:
            state = self._rule.state(function) if self._rule.is_known(function) else None
            if state is None or weight is None:
                return None
            if not all(copies_alike(t, weight.dtype) for t in state.tensors if t.is_cpu):
                return None
            kind: type = type(function)
            found.append(FunctionState((kind, *state.values), state.objects))
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
        weight: LayerFunctions(layer, weight, rule)
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
        self._rules = tuple(rules)
        self._functions = [f for layer in layers for f in functions_of(layer, rules).values()]
        found = self._find()
        self.is_known = found is not None
        self._values, objects = found or ([], [])
        self._objects = list(map(weakref.ref, objects))
        plain = (torch.Tensor, types.FunctionType, types.CodeType)
        called = {type(each) for each in objects if not isinstance(each, plain)}
        self.classes = called | {type(f) for functions in self._functions for f in functions.now}

    def hold(self) -> bool:
        """Return whether the same functions are there, and do the same."""
        if not self._functions:
            return True
        found = self._find()
        if found is None or not self.is_known:
            return found is None and not self.is_known
        values, objects = found
        return (
            values == self._values
            and len(objects) == len(self._objects)
            and all(then() is now for then, now in zip(self._objects, objects, strict=True))
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the functions read, as long as somebody keeps them."""
        alive = (reference() for reference in self._objects)
        return [each for each in alive if isinstance(each, torch.Tensor)]

    def _find(self) -> tuple[list[Hashable], list[object]] | None:
        """The values and objects of all states and of the code; None if something is not known."""
        values: list[Hashable] = []
        objects: list[object] = []
        for rule in self._rules if self._functions else ():
            code = rule.code()
            if code is None:
                return None
            objects += code
        for functions in self._functions:
            states = functions.states()
            if states is None:
                return None
            values.append(len(states))
            for state in states:
                values.append(state.values)
                objects += state.objects
        return values, objects

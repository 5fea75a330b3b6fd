"""Modules and attributes that an extension left on layers: only what no code can read counts."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.engine.validity import left_children
from onediff_ext.engine.validity.left_children import LeftOvers


class Foreign(nn.Module):
    """Of an extension."""


class Layer(nn.Module):
    """Reads nothing but its own children."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def parts(self) -> list[nn.Module]:
        return list(self.children())


class Reads(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return self.blur(x)


class ReadsByItsName(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        inner = getattr(self, "blur", None)
        return x if inner is None else inner(x)


class ReadsElsewhere(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return self._half(x)

    def _half(self, x: torch.Tensor) -> Any:
        return [part(x) for part in (lambda: [self.blur])()]


class ReadsInAProperty(Layer):
    @property
    def first(self) -> Any:
        return self.blur

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any) -> Any:
        return function(*args)

    return run


def decorated_without_a_trace(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)


class ReadsUnderADecorator(Layer):
    @decorated
    def forward(self, x: torch.Tensor) -> Any:
        return self.blur(x)


class ReadsUnderAHiddenDecorator(Layer):
    forward = decorated_without_a_trace(lambda self, x: self.blur(x))


def run_what_it_has(layer: Any, x: torch.Tensor) -> Any:
    return layer.blur(x)


class ReadsInAHelper(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return run_what_it_has(self, x)


class ReadsInAHelperOfItsBase(ReadsInAHelper):
    pass


class GoesThroughAll(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


class GoesThroughAllElsewhere(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for child in self._modules.values():
            assert child is not None
            x = child(x)
        return x


class ReadsByAComputedName(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self, f"bl{'ur'}")(x)


NAMES = ("blur",)


class ReadsByAListOfNames(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return [getattr(self, name)(x) for name in NAMES]


class ReadsWithAnotherGetattr(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        read = getattr
        return read(self, NAMES[0])(x)


class Processor:
    def __call__(self, layer: Any, x: torch.Tensor) -> Any:
        return layer.blur(x)


def is_known(module: nn.Module) -> bool:
    return not isinstance(module, Foreign)


def left_on(layer: nn.Module, *processors: object, child: nn.Module | None = None) -> LeftOvers:
    layer.add_module("blur", Foreign() if child is None else child)
    layer.strength = 0.5  # type: ignore[assignment]
    return LeftOvers(nn.Sequential(layer), processors, is_known)


def test_what_no_code_reads_is_left_over() -> None:
    layer = Layer()
    left = left_on(layer)
    assert left.modules == {id(layer.blur)}
    assert left.has_attribute(layer, "strength")
    assert not left.has_attribute(layer, "linear")


def test_modules_within_are_left_over_too() -> None:
    layer, child = Layer(), Foreign()
    child.inner = nn.SiLU()
    assert left_on(layer, child=child).modules == {id(child), id(child.inner)}


@pytest.mark.parametrize(
    "cls",
    [
        *(Reads, ReadsByItsName, ReadsElsewhere, ReadsInAProperty, ReadsUnderADecorator),
        *(
            ReadsUnderAHiddenDecorator,
            ReadsInAHelper,
            ReadsInAHelperOfItsBase,
            GoesThroughAll,
            GoesThroughAllElsewhere,
            ReadsByAComputedName,
            ReadsByAListOfNames,
            ReadsWithAnotherGetattr,
        ),
    ],
)
def test_what_code_may_read_is_none(cls: type[Layer]) -> None:
    assert not left_on(cls()).modules
    layer = cls()
    layer.blur = 0.5  # type: ignore[assignment]
    assert not LeftOvers(nn.Sequential(layer), (), is_known).has_attribute(layer, "blur")


def test_what_another_layer_or_a_processor_reads_is_none() -> None:
    layer = Layer()
    layer.inner = Reads()
    assert not left_on(layer).modules
    assert not left_on(Layer(), Processor()).modules


def test_what_a_method_of_another_package_hands_on_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a host's patch of another package's class does."""
    host = types.ModuleType("host")
    source = (
        "def helper(layer, x): return layer.blur(x)\ndef forward(self, x): return helper(self, x)"
    )
    exec(source, vars(host))
    monkeypatch.setattr(Layer, "forward", vars(host)["forward"])
    assert not left_on(Layer()).modules


class Decorated:
    """A decorator with a state, whose function is another object at each access."""

    def __init__(self, function: Callable[..., Any]) -> None:
        def call(decorator: Decorated, *args: Any) -> Any:
            return function(*args)

        self._call = call

    @property
    def func(self) -> Any:
        return types.MethodType(self._call, self)

    def __get__(self, layer: Any, cls: type) -> Any:
        return lambda *args: self.func(layer, *args)


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_all_functions_under_decorators_are_read(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one decorator has made has died when the next one is looked at."""

    def forward(layer: Any, x: torch.Tensor) -> Any:
        return layer.blur(x)

    decorated: Any = forward
    for _ in range(count):
        decorated = Decorated(decorated)
    functions = list(left_children._functions_in(decorated))
    assert len(functions) == count + 1
    assert forward in functions
    monkeypatch.setattr(Layer, "forward", decorated)
    assert not left_on(Layer()).modules


def test_a_function_on_a_layer_may_read_it() -> None:
    layer = Layer()
    layer.forward = lambda x: layer.blur(x)  # type: ignore[method-assign]
    assert not left_on(layer).modules


def test_weights_known_classes_and_containers_children_are_none() -> None:
    weighted = Foreign()
    weighted.linear = nn.Linear(2, 2)
    assert not left_on(Layer(), child=weighted).modules
    assert not left_on(Layer(), child=nn.SiLU()).modules
    assert not left_on(nn.Sequential(nn.Linear(2, 2))).modules


def test_a_module_with_another_place_is_none() -> None:
    layer = Layer()
    layer.linear = Foreign()  # type: ignore[assignment]
    assert not left_on(layer, child=layer.linear).modules

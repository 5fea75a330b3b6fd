"""Wrappers that an extension left on a layer: when calls surely pass through."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.engine.validity import left_wrappers
from onediff_ext.engine.validity.left_wrappers import LeftWrapper
from tests.support import left_wrapper_extension as extension
from tests.support.left_wrapper_extension import Settings, leave_on

Kind = Callable[[Settings], Callable[..., Any]]


def wrapper_of(layer: nn.Module) -> LeftWrapper | None:
    return left_wrappers.left_wrappers(layer).get("forward")


@pytest.mark.parametrize("kind", [extension.guarded, extension.guarded_otherwise])
def test_it_passes_exactly_while_its_guard_does(kind: Kind) -> None:
    layer = nn.Linear(2, 2)
    settings = leave_on(layer, kind)
    wrapper = wrapper_of(layer)
    assert wrapper is not None
    x = torch.randn(3, 2)
    for enabled in (True, False, True, False):
        settings.enabled = enabled
        is_same = torch.equal(layer(x), nn.Linear.forward(layer, x))
        assert wrapper.passes() == is_same == (not enabled)


@pytest.mark.parametrize(
    "kind",
    [
        extension.asking,
        extension.computing,
        extension.changing,
        extension.counting,
        extension.with_own_argument,
    ],
)
def test_a_guard_that_proves_nothing_never_passes(kind: Kind) -> None:
    layer = nn.Linear(2, 2)
    leave_on(layer, kind).enabled = False
    wrapper = wrapper_of(layer)
    assert wrapper is None or not wrapper.passes()


def test_wrappers_around_wrappers_pass_when_all_do() -> None:
    layer = nn.Linear(2, 2)
    inner, outer = leave_on(layer), leave_on(layer)
    wrapper = wrapper_of(layer)
    assert wrapper is not None
    for states in ((True, True), (True, False), (False, True), (False, False)):
        inner.enabled, outer.enabled = states
        assert wrapper.passes() == (not any(states))


def test_a_wrapper_of_another_layer_or_of_another_method_does_not_pass() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    settings = leave_on(other)
    settings.enabled = False
    layer.forward = other.forward
    wrapper = wrapper_of(layer)
    assert wrapper is not None
    assert not wrapper.passes()
    settings.forward = nn.Linear(2, 2).extra_repr
    assert not wrapper.passes()


def test_a_class_whose_method_is_replaced_since_does_not_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    layer = Layer()
    leave_on(layer).enabled = False
    wrapper = wrapper_of(layer)
    assert wrapper is not None
    assert wrapper.passes()
    monkeypatch.setattr(Layer, "forward", lambda self, x: x + 1)
    assert not wrapper.passes()


def test_an_object_that_answers_by_code_of_its_own_does_not_pass() -> None:
    class Answering(Settings):
        def __getattribute__(self, name: str) -> Any:
            return object.__getattribute__(self, name)

    layer = nn.Linear(2, 2)
    settings = Answering()
    settings.forward, settings.enabled = layer.forward, False
    layer.forward = extension.guarded(settings)
    wrapper = wrapper_of(layer)
    assert wrapper is not None
    assert not wrapper.passes()


def test_a_file_that_has_changed_since_its_import_proves_nothing(tmp_path: Path) -> None:
    text = Path(extension.__file__).read_text()
    path = tmp_path / "changed_extension.py"
    path.write_text(text.replace("if not settings.enabled:", "if settings.enabled:"))
    spec = importlib.util.spec_from_file_location("changed_extension", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text(text)
    layer = nn.Linear(2, 2)
    settings = Settings()
    settings.forward, settings.enabled = layer.forward, False
    layer.forward = module.guarded(settings)
    assert wrapper_of(layer) is None


def test_other_callables_prove_nothing() -> None:
    layer = nn.Linear(2, 2)
    for forward in (lambda x: x, len, nn.ReLU(), exec):
        assert LeftWrapper.of(layer, "forward", forward) is None

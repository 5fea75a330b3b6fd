"""One state holds for blocks and for whole models: code, hooks, attributes, dynamic weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from onediff_ext.engine.validity.model_state import ModelState, attention_processors
from onediff_ext.engine.validity.python_code import PythonCode


class Processor:
    """Computes attention; a plain object."""

    def __call__(self) -> None:
        """Nothing to compute."""


@pytest.fixture
def model() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(2, 2))
    model[1].processor = Processor()
    return model


def state_of(model: nn.Module) -> ModelState:
    return ModelState(
        list(model.modules()), model, PythonCode(), dynamic_weight_attrs=["online_lora"]
    )


def test_it_holds_while_weights_change(model: nn.Sequential) -> None:
    state = state_of(model)
    model[0].weight.data.zero_()
    model[0].weight = nn.Parameter(torch.ones(2, 2, 1, 1))
    assert state.holds()
    assert state.foreign_code_reason(()) is None
    assert not state.has_dynamic_weights


def test_a_patched_class_of_a_layer_or_a_processor_makes_it_stale(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(model)
    for cls, name in ((nn.Conv2d, "_conv_forward"), (Processor, "__call__")):
        with monkeypatch.context() as patch:
            patch.setattr(cls, name, lambda *args: None)
            assert not state.holds()
        assert state.holds()


def test_a_patched_class_is_named(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda *args: None)
    reason = f"Conv2d is patched by {__name__} (_conv_forward)"
    assert state_of(model).foreign_code_reason(()) == reason
    assert state_of(model).foreign_code_reason((f"{__name__}.",)) is None


def test_a_hook_of_all_modules_makes_it_stale_and_is_named(model: nn.Sequential) -> None:
    state = state_of(model)
    handle = register_module_forward_hook(lambda *args: None)
    try:
        assert not state.holds()
        assert "runs in all modules" in str(state_of(model).foreign_code_reason(()))
    finally:
        handle.remove()
    assert state.holds()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model[0], "padding_mode", "circular"),
        lambda model: setattr(model[1], "online_lora", {"x": 1.0}),
        lambda model: setattr(model[1], "processor", Processor()),
    ],
)
def test_a_changed_attribute_makes_it_stale(
    model: nn.Sequential, change: Callable[[nn.Sequential], None]
) -> None:
    state = state_of(model)
    change(model)
    assert not state.holds()


def test_weights_that_change_at_each_call(model: nn.Sequential) -> None:
    model[1].online_lora = {}
    assert not state_of(model).has_dynamic_weights
    model[1].online_lora = {"x": 1.0}
    state = state_of(model)
    assert state.has_dynamic_weights
    assert state.holds()


def test_processors_are_those_of_attention_layers(model: nn.Sequential) -> None:
    assert attention_processors(model.modules()) == [model[1].processor]

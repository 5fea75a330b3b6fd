"""What decides the merged weights of a LoRA under a CUDA graph is seen, and read when needed."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.lora.peft_layers import PeftLoraRule
from onediff_ext.session.session import Session
from tests.support.adapter_weights import lora_tensors
from tests.support.cuda_graph_steps import assert_right, captured, eager, settle, step
from tests.support.models import sd15

Change = Callable[[Any], Any]


@pytest.fixture
def pipe(session: Session) -> Iterator[Any]:
    pipe = sd15(seed=3)
    pipe.load_lora_weights(lora_tensors(pipe, text=False), adapter_name="a")
    pipe.set_adapters("a", 0.3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    settle(pipe)
    yield pipe
    undo_compile(pipe)


@pytest.fixture
def states_read(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The LoRA layers whose state was read, in order."""
    found: list[nn.Module] = []
    read = PeftLoraRule.state

    def noted(rule: PeftLoraRule, module: nn.Module) -> Any:
        found.append(module)
        return read(rule, module)

    monkeypatch.setattr(PeftLoraRule, "state", noted)
    return found


def layers(pipe: Any) -> list[Any]:
    return [module for module in pipe.unet.modules() if hasattr(module, "lora_A")]


def assert_replayed(pipe: Any) -> None:
    found = step(pipe)
    assert captured(pipe).replayed
    torch.testing.assert_close(found, eager(pipe), rtol=1e-4, atol=1e-5)


def scaling_in_place(layer: Any) -> None:
    layer.scaling["a"] = 0.1


def another_scaling(layer: Any) -> None:
    layer.scaling = {"a": 0.1}


def off(layer: Any) -> None:
    layer._disable_adapters = True


def merged(layer: Any) -> None:
    layer.merged_adapters.append("a")


def none_active(layer: Any) -> None:
    layer._active_adapter = []


@torch.no_grad()
def counted_write(layer: Any) -> None:
    layer.lora_B["a"].weight.mul_(0.1)


@torch.no_grad()
def counted_write_to_the_layer(layer: Any) -> None:
    layer.base_layer.weight.mul_(0.9)


def other_numbers(layer: Any) -> None:
    layer.lora_B["a"].weight.data = layer.lora_B["a"].weight.data * 0.1


def another_factor(layer: Any) -> None:
    old = layer.lora_B["a"]
    layer.lora_B["a"] = nn.Linear(old.in_features, old.out_features, bias=False)


def another_parameter(layer: Any) -> None:
    layer.lora_A["a"].weight = nn.Parameter(layer.lora_A["a"].weight.detach() * 0.1)


CHANGES = (scaling_in_place, another_scaling, off, merged, none_active, counted_write)
WEIGHTS = (counted_write_to_the_layer, other_numbers, another_factor, another_parameter)


@pytest.mark.parametrize("change", CHANGES + WEIGHTS)
def test_a_change_in_the_middle_of_a_picture_is_followed(pipe: Any, change: Change) -> None:
    with compiled_state(pipe).session.picture():
        before = step(pipe)
        assert captured(pipe).replayed
        for layer in layers(pipe):
            change(layer)
        assert not torch.allclose(before, eager(pipe), rtol=1e-2, atol=1e-3)
        for seed in range(6):
            assert_right(pipe, seed)


def test_what_replaced_an_equal_value_is_watched(pipe: Any) -> None:
    with compiled_state(pipe).session.picture():
        for layer in layers(pipe):
            layer.scaling = dict(layer.scaling)
        assert_replayed(pipe)
        for layer in layers(pipe):
            layer.scaling["a"] = 0.1
        assert_right(pipe)


def test_what_was_put_back_is_replayed(pipe: Any) -> None:
    with compiled_state(pipe).session.picture():
        for strength in (0.1, 0.3, 0.1, 0.3):
            for layer in layers(pipe):
                layer.scaling["a"] = strength
            assert_right(pipe)  # merges the weights
            assert_replayed(pipe)


def test_states_are_read_once_while_nothing_changes(
    pipe: Any, states_read: list[nn.Module]
) -> None:
    with compiled_state(pipe).session.picture():
        step(pipe)  # the first of a picture compares weights by content
        states_read.clear()
        for seed in range(5):
            step(pipe, seed)
            assert captured(pipe).replayed
    assert not states_read


def test_an_attribute_that_decides_nothing_costs_one_reading(
    pipe: Any, states_read: list[nn.Module]
) -> None:
    with compiled_state(pipe).session.picture():
        step(pipe)
        layers(pipe)[0].kwargs["note"] = 1
        states_read.clear()
        step(pipe)
        assert captured(pipe).replayed
        assert len(states_read) == len(layers(pipe))
        step(pipe)
        assert len(states_read) == len(layers(pipe))


def test_a_stamp_keeps_no_lora_alive(pipe: Any) -> None:
    factor = weakref.ref(layers(pipe)[0].lora_A["a"].weight)
    pipe.unload_lora_weights()
    for seed in range(3):
        step(pipe, seed)
    gc.collect()
    assert factor() is None


@torch.no_grad()
def scaled_parameter(factor: nn.Module) -> None:
    factor.weight = nn.Parameter(factor.weight * 0.1)


def another_child(factor: nn.Module) -> None:
    factor.register_module("note", nn.Identity())


def scaling_hook(factor: nn.Module) -> None:
    factor.register_forward_hook(lambda _module, _inputs, output: output * 0.1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_parameters", scaled_parameter),
        ("_modules", another_child),
        ("_forward_hooks", scaling_hook),
    ],
)
def test_another_dictionary_of_parts_counts(pipe: Any, name: str, change: Change) -> None:
    """What is written into the new one is not in the old one, which was looked at before."""
    factors = [layer.lora_B["a"] for layer in layers(pipe)]
    with compiled_state(pipe).session.picture():
        step(pipe)
        for factor in factors:
            vars(factor)[name] = OrderedDict(vars(factor)[name])
        step(pipe)
        assert not captured(pipe).replayed
        for seed in range(3):
            step(pipe, seed)
        before = eager(pipe)
        for factor in factors:
            change(factor)
        assert torch.allclose(before, eager(pipe)) == (name == "_modules")
        for seed in range(3):
            assert_right(pipe, seed)

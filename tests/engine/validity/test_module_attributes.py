"""Every change of modules that decides what they compute is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.engine.validity import module_attributes
from onediff_ext.engine.validity.module_attributes import ModuleAttributes


def test_attributes_hooks_and_children_of_modules_count() -> None:
    def changes() -> dict[str, Callable[[nn.Sequential], object]]:
        return {
            "attribute": lambda m: setattr(m[0], "padding_mode", "circular"),
            "new attribute": lambda m: setattr(m[0], "other", 1),
            "private": lambda m: setattr(m[0], "_conv_forward", len),
            "list": lambda m: m[1].sizes.append(1),
            "hook": lambda m: m[1].register_forward_hook(lambda *a: None),
            "child": lambda m: setattr(m, "0", nn.Identity()),
            "class": lambda m: setattr(m[1], "__class__", nn.Identity),
            "own attribute": lambda m: setattr(m, "scale", 2),
            "dictionary": lambda m: setattr(m[0], "__dict__", {**m[0].__dict__, "groups": 2}),
            "own dictionary": lambda m: setattr(m, "__dict__", {**m.__dict__}),
            "name of an attribute": lambda m: setattr(m[1], "widths", m[1].__dict__.pop("sizes")),
            "names of children": lambda m: names_exchanged(m._modules),
            "attribute of an object": lambda m: setattr(m[1].processor, "scale", 2),
            "class of an object": lambda m: setattr(m[1].processor, "__class__", Other),
            "dictionary of an object": lambda m: setattr(m[1].processor, "__dict__", {"scale": 2}),
        }

    for name, change in changes().items():
        model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(2, 2))
        model.scale, model[0].note = 1, "a"
        model[1].processor, model[1].sizes = Processor(), [2]
        state = ModuleAttributes(list(model.modules()), model, ignored={"note"})
        model[0].note = "b"  # decides nothing
        model[0].weight = nn.Parameter(torch.zeros(2, 2, 1, 1))  # read at each call
        model.forward = lambda x: x  # runs around the rest
        assert state.hold(), name
        change(model)
        assert not state.hold(), name


def test_names_are_read_once_for_an_image() -> None:
    model = nn.Sequential(nn.LayerNorm(2))
    state = ModuleAttributes(list(model.modules()), model, parameters=True)
    assert state.hold(epoch=1)
    names_exchanged(model[0]._parameters)
    assert state.hold(epoch=1)
    assert not state.hold(epoch=2)
    assert not state.hold(epoch=2)  # and again until they are right
    names_exchanged(model[0]._parameters)
    assert state.hold(epoch=2)


def test_only_values_that_are_others_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    for layer in model:
        layer.note, layer.scale = object(), 1.5
    state = ModuleAttributes(list(model.modules()), model, ignored={"note"})
    compared = []
    are_equal = module_attributes._are_equal

    def noted(value: Any, other: Any) -> bool:
        compared.append(value)
        return are_equal(value, other)

    monkeypatch.setattr(module_attributes, "_are_equal", noted)
    for layer in model:
        layer.note = object()
    model[3].scale = float("1.5")  # an equal value, and another object
    assert state.hold()
    assert compared == [1.5]
    for layer in model[::2]:
        del layer.note
    model[5].moved, model[3].scale = True, float("1.5")
    del model[5].moved
    assert state.hold()
    assert compared == [1.5, 1.5]
    for layer in model:
        layer.note = object()
    model[3].scale = 2.5
    assert not state.hold()
    model[3].scale, model[4].other = 1.5, None
    assert not state.hold()


class Processor:
    """An object without attributes, as most attention processors are."""


class Other(Processor):
    """Another class."""


def names_exchanged(parts: dict[str, Any]) -> None:
    """Give the parts each other's names, in the order that they have."""
    names, values = list(parts), list(parts.values())
    parts.clear()
    parts.update(zip(reversed(names), values, strict=True))

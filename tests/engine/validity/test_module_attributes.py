"""Every change of modules that decides what they compute is noticed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

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
        }

    for name, change in changes().items():
        model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(2, 2))
        model[1].sizes, model.scale, model[0].note = [2], 1, "a"
        state = ModuleAttributes(list(model.modules()), model, ignored={"note"})
        model[0].note = "b"  # decides nothing
        model[0].weight = nn.Parameter(torch.zeros(2, 2, 1, 1))  # read at each call
        model.forward = lambda x: x  # runs around the rest
        assert state.hold(), name
        change(model)
        assert not state.hold(), name

"""Memory layouts of convolution weights: as `Module.to` makes them, and restored afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from onediff_ext.session.weight_layouts import WeightLayouts


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [parameter.stride() for parameter in model.parameters()]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 24, 1), nn.Conv2d(24, 8, 3), nn.Conv2d(8, 1, 1), nn.Conv2d(1, 4, 3),
        nn.Conv2d(4, 4, 3, groups=4), nn.Linear(4, 4),
    )  # fmt: skip


def test_they_are_those_of_a_model_in_channels_last(model: nn.Module) -> None:
    converted = copy.deepcopy(model).to(memory_format=torch.channels_last)
    values = copy.deepcopy(model.state_dict())
    WeightLayouts().use_channels_last(model)
    assert strides(model) == strides(converted)
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_of_one_pixel_are_not_copied(model: nn.Module) -> None:
    weight = model[0].weight  # type: ignore[index]
    before, stride = weight.data_ptr(), weight.stride()
    layouts = WeightLayouts()
    layouts.use_channels_last(model)
    assert (weight.data_ptr(), weight.stride()) == (before, (16, 1, 16, 16))
    assert stride == (16, 1, 1, 1)


def test_they_are_restored(model: nn.Module) -> None:
    before, values = strides(model), copy.deepcopy(model.state_dict())
    layouts = WeightLayouts()
    layouts.use_channels_last(model)
    layouts.use_channels_last(model)  # nothing is left to change
    layouts.restore()
    assert strides(model) == before
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())

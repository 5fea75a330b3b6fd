"""How far a model's own output is from the exact one: the measure of what rounding may be."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


@torch.no_grad()
def rounding_of(model: nn.Module, arguments: dict[str, Any]) -> float:
    """Measure a model's rounding on one call.

    Args:
        model: Returns an output with a `sample`. Copies of it run, so it may be compiled.
        arguments: Of the call.

    Returns:
        norm(x - exact) / norm(exact), where exact is computed in float64. The larger value of two
        memory formats, for which libraries choose different algorithms.
    """

    def in_float64(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    wide = tree_map_only(torch.Tensor, in_float64, arguments)
    exact = copy.deepcopy(model).double()(**wide).sample
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        sample = arguments["sample"].contiguous(memory_format=layout)
        twin = copy.deepcopy(model).to(memory_format=layout)
        found.append(twin(**{**arguments, "sample": sample}).sample.double())
    return max(float((each - exact).norm() / exact.norm()) for each in found)

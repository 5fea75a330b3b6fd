"""The order in memory of a model's convolution weights, changed and put back."""

from __future__ import annotations

import torch
from torch import nn


class WeightLayouts:
    """Remembers the strides of each weight that was brought into channels last."""

    def __init__(self) -> None:
        self._strides: list[tuple[nn.Parameter, torch.Size, tuple[int, ...]]] = []

    def use_channels_last(self, model: nn.Module) -> None:
        """Bring 4-dim weights of a model into NHWC, those that are not in it yet."""
        for parameter in model.parameters():
            if parameter.ndim == 4 and not parameter.is_contiguous(
                memory_format=torch.channels_last
            ):
                self._strides.append((parameter, parameter.shape, parameter.stride()))
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def take_over(self, other: WeightLayouts) -> None:
        """Put back what another one would have; it has nothing to put back any more."""
        # Of weights that both have changed, the other one's are the older strides.
        self._strides += other._strides
        other._strides = []

    def restore(self) -> None:
        """Leave each weight in the order it had, unless it was replaced by another one."""
        for parameter, shape, stride in self._strides:
            if parameter.shape == shape and parameter.stride() != stride:
                weight = parameter.data
                parameter.data = weight.new_empty_strided(shape, stride).copy_(weight)
        self._strides = []

"""Changes the memory layout of a model's convolution weights to channels last, and restores it."""

from __future__ import annotations

import torch
from torch import nn


class WeightLayouts:
    """The original strides of the weights that were changed to channels last."""

    def __init__(self) -> None:
        self._strides: list[tuple[nn.Parameter, torch.Size, tuple[int, ...]]] = []

    def use_channels_last(self, model: nn.Module) -> None:
        """Change a model's 4-dimensional weights to NHWC, unless they have that layout already.

        Args:
            model: The model; its weights stay the same parameters.
        """
        for parameter in model.parameters():
            if parameter.ndim == 4 and not parameter.is_contiguous(
                memory_format=torch.channels_last
            ):
                self._strides.append((parameter, parameter.shape, parameter.stride()))
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def take_over(self, other: WeightLayouts) -> None:
        """Take over the strides that another object would have restored.

        Args:
            other: The other object; it has nothing left to restore afterwards.
        """
        # For a weight that both have changed, the other object's strides are the older ones.
        self._strides += other._strides
        other._strides = []

    def restore(self) -> None:
        """Give each weight its original layout, unless a weight of another shape replaced it."""
        for parameter, shape, stride in self._strides:
            if parameter.shape == shape and parameter.stride() != stride:
                weight = parameter.data
                parameter.data = weight.new_empty_strided(shape, stride).copy_(weight)
        self._strides = []

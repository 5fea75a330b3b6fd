"""Changes the memory layout of a model's convolution weights to channels last, and restores it."""

from __future__ import annotations

import torch
from torch import nn

from onediff_ext.engine.blocks.weight_form import is_plain


class WeightLayouts:
    """The original strides of the weights that were changed to channels last."""

    def __init__(self) -> None:
        self._strides: list[tuple[nn.Parameter, torch.Size, tuple[int, ...]]] = []

    def use_channels_last(self, model: nn.Module) -> None:
        """Change a model's 4-dimensional weights to NHWC, unless they have that layout already.

        The strides are those of ``model.to(memory_format=torch.channels_last)``, also for weights
        of one pixel, which are in both orders at once. PyTorch calls them contiguous in NHWC with
        any strides, but compilers decide by the strides: with those of NCHW they take the
        convolution for one of NCHW, which is slow for 45x45 pixels (SD1.5 at 720x720, H100).

        Args:
            model: The model; its weights stay the same parameters.
        """
        for parameter in model.parameters():
            if parameter.ndim != 4:
                continue
            weight, nhwc = parameter.data, torch.channels_last
            is_nhwc = weight.is_contiguous(memory_format=nhwc)
            if is_nhwc and (weight.stride() == _nhwc_stride(weight) or not is_plain(parameter)):
                continue
            self._strides.append((parameter, weight.shape, weight.stride()))
            if is_nhwc:  # the same memory
                parameter.data = weight.as_strided(weight.shape, _nhwc_stride(weight))
            else:
                parameter.data = weight.contiguous(memory_format=nhwc)

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


def _nhwc_stride(weight: torch.Tensor) -> tuple[int, int, int, int]:
    _, channels, height, width = weight.shape
    return channels * height * width, 1, channels * width, channels

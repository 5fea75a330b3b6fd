"""One call of a block as a graph takes it: layouts, a signature, checks that graphs do not make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onediff_ext.engine.blocks.family import BlockCall
from onediff_ext.engine.export.exporter import Autocast, is_channels_last
from onediff_ext.engine.torch_versions import autocast_dtype


def work(call: BlockCall, weights: Sequence[torch.Tensor]) -> float:
    """About how many multiplications a call costs: each weight at each place of the image."""
    image = call.tensors[0]
    places = image.numel() / (image.shape[1] if image.ndim == 4 else image.shape[-1])
    return places * sum(weight.numel() for weight in weights)


def normalise(tensor: torch.Tensor) -> torch.Tensor:
    """The one layout that graphs are built for: NHWC images, everything else contiguous."""
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def boundary_problem(
    inputs: Sequence[torch.Tensor], call: BlockCall, weights: Sequence[torch.Tensor]
) -> str | None:
    """What a stored graph would not notice by itself, since it checks none of its inputs."""
    device = inputs[0].device
    sizes: dict[str, int] = {}
    for tensor, dims in zip(inputs, call.dims, strict=True):
        if tensor.ndim != len(dims):
            return f"an input has {tensor.ndim} dims where {len(dims)} are expected"
        if tensor.device != device:
            return "inputs on different devices"
        for size, name in zip(tensor.shape, dims, strict=True):
            if name is None:
                continue
            if size == 0:
                return f"an empty {name}"
            if sizes.setdefault(name, size) != size:
                return f"{name} differs between inputs"
    if any(weight.device != device for weight in weights):
        return "weights are on another device (offloading)"
    if sizes["batch"] > 63:
        return "more than 63 images at once"
    return None


def signature(call: BlockCall) -> tuple[Any, ...]:
    fixed = tuple(
        (t.dtype, t.device, *(n for n, name in zip(t.shape, dims, strict=True) if name is None))
        for t, dims in zip(call.tensors, call.dims, strict=True)
    )
    return (fixed, call.statics, call.prompt is None)


def autocast_state(device_type: str) -> Autocast:
    dtype = autocast_dtype(device_type)
    return None if dtype is None else (device_type, dtype)


def input_text(tensor: torch.Tensor, dims: Sequence[str | None]) -> str:
    shape = ",".join(name or str(n) for n, name in zip(tensor.shape, dims, strict=True))
    layout = " nhwc" if is_channels_last(tensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} [{shape}]{layout}"

"""One call of a block as a graph takes it: layouts, a signature, checks that graphs do not make."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from onediff_ext.engine.blocks.family import DIM_BOUNDS, BlockCall
from onediff_ext.engine.blocks.weight_form import is_plain
from onediff_ext.engine.export.exporter import Autocast, is_channels_last
from onediff_ext.engine.quantization import FEWEST_ROWS
from onediff_ext.engine.torch_versions import autocast_dtype


def work(call: BlockCall, weights: Sequence[torch.Tensor]) -> float:
    """Estimate the multiplications of a call: each weight once for each place of the image.

    Args:
        call: Its first tensor is an image (batch, channels, height, width), or tokens whose last
            dim is their width.
        weights: All weights of the block.

    Returns:
        Places, in cells or tokens of all images, times the elements of all weights.
    """
    image = call.tensors[0]
    places = image.numel() / (image.shape[1] if image.ndim == 4 else image.shape[-1])
    return places * sum(weight.numel() for weight in weights)


def normalise(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the layout that graphs are built for: NHWC images, others contiguous.

    Args:
        tensor: One with four dims is an image (batch, channels, height, width). It is copied only
            if it lies in another order.
    """
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def boundary_reason(inputs: Sequence[torch.Tensor], call: BlockCall) -> str | None:
    """Say why a stored graph would compute nonsense, or None.

    A stored graph checks none of its inputs.

    Args:
        inputs: The normalised tensors of the call.
        call: Names their dims.

    Returns:
        The eager reason, in plain words: inputs of other forms or classes, empty or unequal dims,
        inputs on several devices, or more than 63 images.
    """
    device = inputs[0].device
    sizes: dict[str, int] = {}
    for tensor, dims in zip(inputs, call.dims, strict=True):
        if tensor.ndim != len(dims):
            return f"an input has {tensor.ndim} dims where {len(dims)} are expected"
        if not is_plain(tensor):
            return f"an input is a {type(tensor).__qualname__}"
        if tensor.device != device:
            return "inputs on different devices"
        for size, name in zip(tensor.shape, dims, strict=True):
            if name is None:
                continue
            if size == 0:
                return f"an empty {name}"
            if sizes.setdefault(name, size) != size:
                return f"{name} differs between inputs"
    if sizes["batch"] > DIM_BOUNDS["batch"][1]:
        return "more than 63 images at once"
    return None


def signature(call: BlockCall) -> Hashable:
    """Return what calls of one kind have in common: dtypes, devices, fixed dims, statics.

    Args:
        call: A call without a `boundary_reason`.
    """
    fixed = tuple(
        (t.dtype, t.device, *(n for n, name in zip(t.shape, dims, strict=True) if name is None))
        for t, dims in zip(call.tensors, call.dims, strict=True)
    )
    return (fixed, call.statics, call.prompt is None)


def precision_of(wanted: str, call: BlockCall) -> str:
    """Return the precision of a call's graph: "exact" for too few tokens, such as a short prompt's.

    Args:
        wanted: The user's.
        call: Tokens among its tensors are (batch, tokens, channels).
    """
    fewest = FEWEST_ROWS.get(wanted, 1)
    if fewest > 1:
        for tensor, dims in zip(call.tensors, call.dims, strict=True):
            if len(dims) == 3 and dims[2] is None and tensor.shape[0] * tensor.shape[1] < fewest:
                return "exact"
    return wanted


def autocast_state(device_type: str) -> Autocast:
    """Return the device type and dtype of the active autocast, or None.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    dtype = autocast_dtype(device_type)
    return None if dtype is None else (device_type, dtype)


def input_text(tensor: torch.Tensor, dims: Sequence[str | None]) -> str:
    """Describe an input in a kind's key.

    Args:
        tensor: The input.
        dims: The names of its dims; None for a dim whose size is part of the kind.

    Returns:
        Dtype, shape and layout, such as ``"float16 [batch,320,height,width] nhwc"``.
    """
    shape = ",".join(name or str(n) for n, name in zip(tensor.shape, dims, strict=True))
    layout = " nhwc" if is_channels_last(tensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} [{shape}]{layout}"

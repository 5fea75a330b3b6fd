"""Tensors between torch and OneFlow, sharing memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from onediff_ext.engine.export.exporter import is_channels_last

_NHWC, _NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


def is_permuted(tensor: torch.Tensor) -> bool:
    """Whether a tensor goes to OneFlow as [B, H, W, C], which is how it lies in memory."""
    return is_channels_last(tensor) and not tensor.is_contiguous()


def to_flow(flow: Any, tensor: torch.Tensor) -> Any:
    """A torch tensor as OneFlow's, [B, H, W, C] where `is_permuted`.

    Its memory is shared wherever it lies in one of these two orders, and never
    strided: nn.Graph would rearrange a strided input in the caller's own memory.
    """
    tensor = tensor.detach()
    if is_permuted(tensor):
        tensor = tensor.permute(_NHWC)
    return flow.from_dlpack(to_dlpack(tensor.contiguous()))


def restore_order(tensor: Any) -> Any:
    """A permuted OneFlow tensor as [B, C, H, W] again."""
    return tensor.permute(*_NCHW)


def to_torch(flow: Any, tensor: Any) -> torch.Tensor:
    """A OneFlow tensor as torch's, in shared memory, once its value is there.

    OneFlow works asynchronously; making the capsule waits, on a CPU. Without it an input
    could be overwritten by its owner before it was read.
    """
    if tensor.is_cuda:
        flow.cuda.synchronize(tensor.device.index)
    shared: torch.Tensor = from_dlpack(flow.to_dlpack(tensor))
    return shared


def wait_for_torch(device: torch.device) -> None:
    """Make sure that what torch was asked for on a GPU is there: OneFlow has its own streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

"""Pass tensors between torch and OneFlow in shared memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from onediff_ext.engine.export.exporter import is_channels_last

_NHWC, _NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


def is_permuted(tensor: torch.Tensor) -> bool:
    """Whether a tensor is passed to OneFlow as [B, H, W, C], its order in memory."""
    return is_channels_last(tensor) and not tensor.is_contiguous()


def to_flow(flow: Any, tensor: torch.Tensor) -> Any:
    """Convert a torch tensor to OneFlow, as [B, H, W, C] where `is_permuted`.

    Memory is shared if it is in one of these two orders. A tensor with other strides is copied:
    nn.Graph would rearrange it in the caller's own memory.
    """
    tensor = tensor.detach()
    if is_permuted(tensor):
        tensor = tensor.permute(_NHWC)
    return flow.from_dlpack(to_dlpack(tensor.contiguous()))


def restore_order(tensor: Any) -> Any:
    """Permute a OneFlow tensor [B, H, W, C] back to [B, C, H, W]."""
    return tensor.permute(*_NCHW)


def to_torch(flow: Any, tensor: Any) -> torch.Tensor:
    """Convert a OneFlow tensor to torch in shared memory, after its value is computed.

    OneFlow works asynchronously. On a CPU, creating the capsule waits. Without waiting, the owner
    could overwrite an input before OneFlow reads it.
    """
    if tensor.is_cuda:
        flow.cuda.synchronize(tensor.device.index)
    shared: torch.Tensor = from_dlpack(flow.to_dlpack(tensor))
    return shared


def wait_for_torch(device: torch.device) -> None:
    """Wait for torch's work on a GPU, since OneFlow uses its own streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

"""Whether a tensor still holds what it held."""

from __future__ import annotations

import torch


def content_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's values lie and how often they were written in place; another pair after a
    change. Of tensors made under inference mode torch counts no writes: these are not seen."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version

"""The dtype that a checkpoint's weights get, by the user's name for it."""

from __future__ import annotations

from pathlib import Path

import torch

from onediff_ext.hosts.diffusers.checkpoints.model_folder import is_transformer_folder
from onediff_ext.store.content_hash import model_folder

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FIRST_WITH_BF16 = (8, 0)  # compute capability


def weights_dtype(
    name: str, device: torch.device, model: Path, config: Path | None = None
) -> torch.dtype:
    """Return the dtype of a checkpoint's weights.

    Transformers are trained in bfloat16, and the activations of some overflow in float16.

    Args:
        name: "fp32", "fp16", "bf16" or "auto". "auto" is float32 on a CPU and float16 on a GPU;
            for a transformer it is bfloat16 on GPUs that compute in it.
        device: Where the weights will be.
        model: The checkpoint's file or folder.
        config: The folder beside a transformer's single file; None for other checkpoints.
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cuda":
        return torch.float32
    is_transformer = config is not None or is_transformer_folder(model_folder(model))
    return torch.bfloat16 if is_transformer and computes_in_bf16(device) else torch.float16


def computes_in_bf16(device: torch.device) -> bool:
    """Whether a device is a GPU that is as fast in bfloat16 as in float16.

    Args:
        device: Any device.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_BF16

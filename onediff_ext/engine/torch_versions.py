"""What torch lacks or names otherwise in older versions, down to 2.1.

Whoever needs such a thing takes it from here, so that all else is written for the newest torch.
docs/torch-versions.md says what was run on which version.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.torch_version import TorchVersion

VERSION = TorchVersion(torch.__version__)

# A class of `torch.cuda` before 2.5.
OutOfMemoryError: type[RuntimeError] = (
    torch.OutOfMemoryError if hasattr(torch, "OutOfMemoryError") else torch.cuda.OutOfMemoryError
)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes with on this kind of device, or None when it is off."""
    if VERSION >= "2.4":
        enabled = torch.is_autocast_enabled(device_type)
        return torch.get_autocast_dtype(device_type) if enabled else None
    if device_type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return None


def cudnn_attention_enabled() -> bool:
    """Whether attention may take cuDNN's kernel, which it could not before 2.2."""
    enabled = getattr(torch.backends.cuda, "cudnn_sdp_enabled", None)
    return enabled is not None and bool(enabled())


def end_recording_to_pool(device_index: int, pool: Any) -> None:
    """Have the allocator put nothing more into the pool of a CUDA graph that failed.

    Raises:
        RuntimeError: It puts nothing there.
    """
    bindings: Any = torch._C
    if hasattr(bindings, "_cuda_endAllocateToPool"):
        bindings._cuda_endAllocateToPool(device_index, pool)
    elif VERSION >= "2.2":
        bindings._cuda_endAllocateCurrentStreamToPool(device_index, pool)
    else:  # the stream of a failed recording is still the current one
        bindings._cuda_endAllocateCurrentStreamToPool(device_index)


def dynamic_dim(name: str, least: int, most: int) -> Any:
    """A dim for `torch.export` that is symbolic between these bounds.

    torch 2.6 takes bounds only for dims with names, of which equal ones are one symbol.
    """
    hint: Any = torch.export.Dim.AUTO
    return (
        hint(min=least, max=most) if callable(hint) else torch.export.Dim(name, min=least, max=most)
    )


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Without torch 2.6's warning for each layer of a block that is deliberately no submodule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unable to find the path of the module")
        yield

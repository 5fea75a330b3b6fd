"""Makes this torch lack what 2.1 lacks, as far as our own code could ask for it.

``python -m pytest -p tests.support.torch_2_1 ...``, or imported first thing.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NoReturn

import torch
import torch.library
from torch.utils import _pytree

_ABSENT = (
    (torch, "OutOfMemoryError"),
    (torch, "get_autocast_dtype"),
    (torch.backends.cuda, "cudnn_sdp_enabled"),
    (torch.export.Dim, "AUTO"),
    (torch.library, "triton_op"),
    (torch.library, "wrap_triton"),
    (_pytree, "tree_leaves"),
)


def is_autocast_enabled() -> bool:
    """For CUDA, without an argument."""
    return False


class _MatMul:
    """`torch.backends.cuda.matmul`, whose unknown settings are no AttributeError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"Unknown attribute {name}")


if torch.__version__ >= "2.6":
    # torch 2.13 imports these when a mode sees its first operator, and they need what goes below.
    for module in ("torch._dynamo", "torch.distributed.tensor"):
        importlib.import_module(module)
    torch.__version__ = "2.1.2"
    for owner, name in _ABSENT:
        if hasattr(owner, name):
            delattr(owner, name)
    lacking: Any = torch
    lacking.is_autocast_enabled = is_autocast_enabled
    lacking.backends.cuda.matmul = _MatMul()
    sys.modules["torch.export.passes"] = None  # type: ignore[assignment]

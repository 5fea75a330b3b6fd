"""Stable Diffusion compiled once for any size, checkpoint and LoRA.

Importing this package loads neither torch nor gradio; the names below are
resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {
    "CompileOptions": "onediff_ext.core.options",
    "OneDiffError": "onediff_ext.core.errors",
    "compile_pipe": "onediff_ext.hosts.diffusers.compile",
    "compile_module": "onediff_ext.hosts.diffusers.compile_module",
    "oneflow_compile": "onediff_ext.hosts.diffusers.compile_module",
    "compiled": "onediff_ext.hosts.diffusers.compile",
    "undo_compile": "onediff_ext.hosts.diffusers.compile",
    "save_pipe": "onediff_ext.hosts.diffusers.persistence",
    "load_pipe": "onediff_ext.hosts.diffusers.persistence",
    "load_checkpoint": "onediff_ext.hosts.diffusers.checkpoints.load",
}

__all__ = [
    "CompileOptions",
    "OneDiffError",
    "__version__",
    "compile_module",
    "compile_pipe",
    "compiled",
    "load_checkpoint",
    "load_pipe",
    "oneflow_compile",
    "save_pipe",
    "undo_compile",
]

if TYPE_CHECKING:
    from onediff_ext.core.errors import OneDiffError
    from onediff_ext.core.options import CompileOptions
    from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
    from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled, undo_compile
    from onediff_ext.hosts.diffusers.compile_module import compile_module, oneflow_compile
    from onediff_ext.hosts.diffusers.persistence import load_pipe, save_pipe


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

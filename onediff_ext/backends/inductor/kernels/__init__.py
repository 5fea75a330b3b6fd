"""Triton kernels for operations where Inductor is clearly slower, and the graph rewrites for them.

`python -m benchmarks.kernels` compares them with Inductor's own code. The kernels need Triton;
only the inductor backend uses them, on CUDA devices.
"""

from __future__ import annotations

import importlib


def register_kernels() -> None:
    """Import the kernels, which registers them as `torch.ops.onediff`; needs Triton."""
    for name in (
        "activated_rows",
        "cross_attention",
        "flash_attention",
        "geglu",
        "group_norm",
        "int8_rows",
        "layer_norm",
        "rotary_norm",
        "written",
    ):
        importlib.import_module(f"onediff_ext.backends.inductor.kernels.{name}")

"""Attention to a prompt becomes our cross-attention kernel, the rest FlashAttention if installed."""

from __future__ import annotations

from typing import Any

import torch

from onediff_ext.backends.inductor.flash_compiler import has_flash_attention
from onediff_ext.backends.inductor.kernels.fx_nodes import arguments_of, replace


def rewrite_attention(node: Any) -> None:
    """Replace attention without a mask, up to 256 channels for each head."""
    query, key, value, mask, dropout, causal, scale, grouped = arguments_of(node, 8)
    forms = [n.meta["val"] for n in (query, key, value)]
    width = forms[0].shape[-1]
    if mask is not None or dropout or causal or grouped or any(f.ndim != 4 for f in forms):
        return
    if any(f.dtype not in (torch.float16, torch.bfloat16) for f in forms):
        return
    if not isinstance(width, int) or width > 256 or any(f.shape[-1] != width for f in forms):
        return
    if any(str(f.shape[:2]) != str(forms[0].shape[:2]) for f in forms):
        return
    scale = width**-0.5 if scale is None else scale
    if scale <= 0:
        return
    if str(forms[0].shape[2]) == str(forms[1].shape[2]):
        if has_flash_attention(forms[0].dtype, width, forms[0].device):
            replace(node, torch.ops.onediff.flash_attention.default, (query, key, value, scale))
        return
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return  # Triton multiplies without tensor cores there
    replace(node, torch.ops.onediff.cross_attention.default, (query, key, value, scale))

"""How the two hosts compute attention, as far as a graph has to do the same.

Both choose one function for the process; extensions may put their own in its place.
Source: backend/attention.py of Forge, ldm_patched/ldm/modules/attention.py of reForge.
"""

from __future__ import annotations

from types import ModuleType

import torch

from onediff_ext.hosts.forge.blocks import AttentionRules

# Functions whose result is that of PyTorch's kernel but for rounding. Those that quantise
# (sage) are not: a graph would draw another picture than the host.
_EXACT = frozenset(
    {
        "attention_pytorch",
        "attention_xformers",
        "attention_flash",
        "attention_basic",
        "attention_split",
        "attention_sub_quad",
    }
)
_EXACT_SPATIAL = frozenset(
    {
        "pytorch_attention_single_head_spatial",
        "xformers_attention_single_head_spatial",
        "normal_attention_single_head_spatial",
    }
)
# These alone compute their scores in float32 when the host asks for it.
_UPCASTING = frozenset({"attention_basic", "attention_split", "attention_sub_quad"})


def forge_attention() -> AttentionRules:
    """The rules of Forge."""
    from backend import attention
    from backend.nn import unet, vae

    def refusal_reason() -> str | None:
        chosen = _foreign(unet.attention_function, attention, _EXACT)
        spatial = vae.attention_function_single_head_spatial
        return chosen or _foreign(spatial, attention, _EXACT_SPATIAL)

    def upcasts(wanted: torch.dtype | None, dtype: torch.dtype) -> bool:  # noqa: ARG001
        if unet.attention_function.__name__ not in _UPCASTING:
            return False
        return attention.get_attn_precision(None) is torch.float32

    return AttentionRules(refusal_reason, upcasts)


def reforge_attention() -> AttentionRules:
    """The rules of reForge."""
    from ldm_patched.ldm.modules import attention

    def refusal_reason() -> str | None:
        return _foreign(attention.optimized_attention, attention, _EXACT)

    def upcasts(wanted: torch.dtype | None, dtype: torch.dtype) -> bool:
        if attention.optimized_attention.__name__ not in _UPCASTING:
            return False
        return attention.get_attn_precision(wanted, dtype) is torch.float32

    return AttentionRules(refusal_reason, upcasts)


def _foreign(function: object, home: ModuleType, exact: frozenset[str]) -> str | None:
    """Why an attention function is not known as exact, or None."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in exact and getattr(home, name, None) is function:
        return None
    return f"attention by {name} is not known to be exact"

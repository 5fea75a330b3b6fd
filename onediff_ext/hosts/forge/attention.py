"""How Forge and reForge compute attention, and whether a graph can compute the same.

Both choose one function for the process; extensions may replace it.
Source: backend/attention.py of Forge, ldm_patched/ldm/modules/attention.py of reForge.
"""

from __future__ import annotations

import torch

from onediff_ext.hosts.forge_attention import EXACT, AttentionRules, inexact_reason

_EXACT_SPATIAL = frozenset(
    {
        "pytorch_attention_single_head_spatial",
        "xformers_attention_single_head_spatial",
        "normal_attention_single_head_spatial",
    }
)
# Only these compute their scores in float32 when the host asks for it.
_UPCASTING = frozenset({"attention_basic", "attention_split", "attention_sub_quad"})

_ADVICE = {
    "attention_sage": "start reForge without --use-sage-attention",
    "attention_sage3": "start reForge without --use-sage-attention3",
}


def forge_attention() -> AttentionRules:
    """The rules of Forge."""
    from backend import attention
    from backend.nn import unet, vae

    def refusal_reason() -> str | None:
        return inexact_reason(unet.attention_function, attention, EXACT)

    def vae_refusal_reason() -> str | None:
        spatial = vae.attention_function_single_head_spatial
        return inexact_reason(spatial, attention, _EXACT_SPATIAL)

    def upcasts(wanted: torch.dtype | None, dtype: torch.dtype) -> bool:  # noqa: ARG001
        if unet.attention_function.__name__ not in _UPCASTING:
            return False
        return attention.get_attn_precision(None) is torch.float32

    return AttentionRules(refusal_reason, vae_refusal_reason, upcasts)


def reforge_attention() -> AttentionRules:
    """The rules of reForge."""
    from ldm_patched.ldm.modules import attention

    def refusal_reason() -> str | None:
        return inexact_reason(attention.optimized_attention, attention, EXACT, _ADVICE)

    def upcasts(wanted: torch.dtype | None, dtype: torch.dtype) -> bool:
        if attention.optimized_attention.__name__ not in _UPCASTING:
            return False
        return attention.get_attn_precision(wanted, dtype) is torch.float32

    return AttentionRules(refusal_reason, upcasts=upcasts, advice=_ADVICE)

"""How Neo computes attention, and whether a graph can compute the same.

It chooses one function for the process, and one for VAEs; extensions may replace them.
Source: backend/attention.py of Neo 2.26.
"""

from __future__ import annotations

import torch

from onediff_ext.hosts.forge_attention import EXACT, AttentionRules, inexact_reason

_EXACT_VAE = frozenset({"pytorch_attention_vae", "xformers_attention_vae", "normal_attention_vae"})

# Neo uses sage attention as soon as it is installed.
_ADVICE = {"attention_sage": "start Neo with --disable-sage"}


def neo_attention() -> AttentionRules:
    """The rules of Neo."""
    from backend import attention
    from backend.nn import unet, vae

    def refusal_reason() -> str | None:
        return inexact_reason(unet.attention_function, attention, EXACT, _ADVICE)

    def vae_refusal_reason() -> str | None:
        return inexact_reason(vae.attention_function_vae, attention, _EXACT_VAE)

    def upcasts(wanted: torch.dtype | None, dtype: torch.dtype) -> bool:
        # In 2.26 the host's own function always says None: --force-upcast-attention does nothing.
        if unet.attention_function.__name__ != "attention_basic":
            return False
        return attention.get_attn_precision(wanted, dtype) is torch.float32

    return AttentionRules(refusal_reason, vae_refusal_reason, upcasts, _ADVICE)

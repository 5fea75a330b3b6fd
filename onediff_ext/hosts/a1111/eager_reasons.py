"""Why A1111 draws eager: everything that changes weights or forwards behind a graph."""

from __future__ import annotations

from typing import Any

from torch import nn

from onediff_ext.hosts.a1111.class_patches import unknown_patch_reason
from onediff_ext.hosts.a1111.lora import lora_eager_reason

# The modules that attention may come from: the packages themselves and A1111's own choices.
_KNOWN_ATTENTION = (
    "ldm.modules.attention",
    "sgm.modules.attention",
    "modules.sd_hijack_optimizations",
    "modules.hypernetworks.hypernetwork",
)


def job_eager_reason(model: Any, job: Any = None) -> str | None:
    """Why nothing of this model can run through graphs now, in plain words, or None.

    Args:
        model: The host's ``sd_model``, or None.
        job: The host's processing object; None outside a job.
    """
    from modules import devices, sd_unet

    if model is None:
        return "no checkpoint is loaded"
    if devices.fp8:
        return "weights are stored as fp8"
    if hasattr(nn.Linear, "org_forward"):
        return "this GPU needs layers that cast by hand"
    if devices.unet_needs_upcast:
        return "--upcast-sampling casts inside layers"
    if sd_unet.current_unet is not None:
        return f"the UNet of {sd_unet.current_unet.option.label} is active"
    reason = lora_eager_reason()
    if reason is not None:
        return reason
    if _has_hypernetwork(job):
        return "a hypernetwork changes the context"
    patched = unknown_patch_reason()
    if patched is not None:
        return f"{patched}, which is not known here"
    return None


def _has_hypernetwork(job: Any) -> bool:
    """Whether a hypernetwork changes the context in this job.

    A1111 keeps the last job's hypernetworks loaded until it activates this job's, which is after
    a job has begun. Until then the prompts and the setting decide.
    """
    from modules import shared

    prompts = getattr(job, "all_prompts", None)
    if prompts is None or getattr(job, "extra_network_data", None) is not None:
        return bool(shared.loaded_hypernetworks)
    always = getattr(shared.opts, "sd_hypernetwork", None)
    return always not in (None, "", "None") or any("<hypernet:" in text for text in prompts)


def attention_eager_reason() -> str | None:
    """Why attention cannot be a graph's just now, or None."""
    import ldm.modules.attention
    import sgm.modules.attention

    for package in (ldm, sgm):
        source = package.modules.attention.CrossAttention.forward.__module__
        if source not in _KNOWN_ATTENTION:
            return f"attention is replaced by {source}"
    return None

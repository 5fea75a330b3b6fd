"""When A1111 has to draw eager: everything that changes weights or forwards behind a graph."""

from __future__ import annotations

from typing import Any

from torch import nn

from onediff_ext.hosts.a1111.lora import foreign_patch

# Where the attention may come from: the packages themselves and A1111's own choices.
_KNOWN_ATTENTION = (
    "ldm.modules.attention",
    "sgm.modules.attention",
    "modules.sd_hijack_optimizations",
    "modules.hypernetworks.hypernetwork",
)


def job_refusal(model: Any, job: Any = None) -> str | None:
    """Why nothing of this model can run through graphs now, in plain words, or None.

    Args:
        model: The host's ``sd_model``, or None.
        job: The host's processing object; None outside a job.
    """
    from modules import devices, sd_unet, shared

    if model is None:
        return "no checkpoint is loaded"
    if getattr(model, "lowvram", False):
        return "--medvram and --lowvram move weights in and out while drawing"
    if devices.fp8:
        return "weights are stored as fp8"
    if hasattr(nn.Linear, "org_forward"):
        return "this GPU needs layers that cast by hand"
    if devices.unet_needs_upcast:
        return "--upcast-sampling casts inside layers"
    if sd_unet.current_unet is not None:
        return f"the UNet of {sd_unet.current_unet.option.label} is active"
    if getattr(shared.opts, "lora_functional", False):
        return 'the setting "Lora/Networks: use old method" applies LoRAs in each forward'
    if _has_hypernetwork(job):
        return "a hypernetwork changes the context"
    patched = foreign_patch()
    if patched is not None:
        return f"{patched}, which is not known here"
    return None


def _has_hypernetwork(job: Any) -> bool:
    """Whether one changes the context in this job. A1111 leaves those of the job before loaded
    until it activates the networks of this one, which is after a job has begun."""
    from modules import shared

    prompts = getattr(job, "all_prompts", None)
    if prompts is None or getattr(job, "extra_network_data", None) is not None:
        return bool(shared.loaded_hypernetworks)
    always = getattr(shared.opts, "sd_hypernetwork", None)
    return always not in (None, "", "None") or any("<hypernet:" in text for text in prompts)


def attention_refusal() -> str | None:
    """Why attention cannot be a graph's just now, or None."""
    import ldm.modules.attention
    import sgm.modules.attention

    for package in (ldm, sgm):
        source = package.modules.attention.CrossAttention.forward.__module__
        if source not in _KNOWN_ATTENTION:
            return f"attention is replaced by {source}"
    return None

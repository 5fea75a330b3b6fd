"""The samplers of flow-matching models (SD3, Flux and other transformers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.schedulers import check_schedule, infotext_names

FLOW_SAMPLERS = {
    "Euler": "FlowMatchEulerDiscreteScheduler",
    "LCM": "FlowMatchLCMScheduler",
}
"""A1111's name → class in diffusers. Pipelines hand their own noise levels to `set_timesteps`,
which diffusers' other schedulers of flows do not take."""

_SCHEDULES = {
    "Automatic": {},
    "Uniform": {},
    "Karras": {"use_karras_sigmas": True},
    "Exponential": {"use_exponential_sigmas": True},
    "Beta": {"use_beta_sigmas": True},
}


def make_flow_scheduler(name: str, config: Mapping[str, Any]) -> Any:
    """Create the scheduler of a sampler for a flow-matching model.

    Args:
        name: A1111's name, with or without a schedule type at its end ("Euler Beta").
        config: Of the model's own scheduler; its shifts belong to the model.

    Raises:
        OptionError: The sampler or its schedule type is not for these models.
    """
    import diffusers

    sampler, schedule = infotext_names(name)
    if sampler not in FLOW_SAMPLERS or schedule not in _SCHEDULES:
        raise OptionError(
            f"The sampler {name} is not for flow-matching models.",
            f"Use one of: {', '.join(FLOW_SAMPLERS)}; with Karras, Exponential or Beta behind it.",
        )
    check_schedule(schedule)
    # "Automatic" is the model's own schedule; the others replace it.
    own = dict(config)
    if schedule != "Automatic":
        own |= dict.fromkeys((key for each in _SCHEDULES.values() for key in each), False)
    cls = getattr(diffusers, FLOW_SAMPLERS[sampler])
    return cls.from_config({**own, **_SCHEDULES[schedule]})

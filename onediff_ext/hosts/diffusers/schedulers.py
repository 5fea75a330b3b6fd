"""Create a diffusers scheduler from the name of a sampler in A1111 or diffusers."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.samplers import SAMPLERS, SCHEDULES, Sampler

logger = logging.getLogger(__name__)

_NOISE_KEYS = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
    "steps_offset",
    "set_alpha_to_one",
    "clip_sample",
    "rescale_betas_zero_snr",
)
"""Config entries that belong to the model; the others belong to the sampler."""


def sampler_names() -> list[str]:
    """Return the samplers' names, in the order of menus."""
    return [sampler.name for sampler in SAMPLERS]


def infotext_names(name: str, schedule: str = "Automatic") -> tuple[str, str]:
    """Split a sampler's name into A1111's infotext entries.

    Args:
        name: "DPM++ 2M", the older "DPM++ 2M Karras", or a diffusers class name.
        schedule: Schedule type, unless the name ends in one.

    Returns:
        ("Sampler", "Schedule type"), for example ("DPM++ 2M", "Karras").

    Raises:
        OptionError: The sampler or schedule type is unknown.
    """
    sampler, schedule = _find(name, schedule)
    return sampler.name, schedule


def make_scheduler(name: str, config: Mapping[str, Any], schedule: str = "Automatic") -> Any:
    """Create the scheduler of a sampler for a model.

    Args:
        name: A1111's name, with or without a schedule type at its end ("DPM++ 2M Karras"), or
            the name of a diffusers class in `SAMPLERS`. Case is ignored.
        config: The config of any scheduler of the same model, for the noise levels.
        schedule: A1111's schedule type. "Automatic" means the sampler's own as in A1111, for
            instance Karras for DPM++ 2M; "Uniform" means evenly spaced timesteps.

    Raises:
        OptionError: The sampler or schedule type is unknown, the two do not fit together, or a
            package that the sampler needs is missing.
    """
    import diffusers

    sampler, schedule = _find(name, schedule)
    if schedule == "Automatic":
        schedule = sampler.schedule
    if sampler.needs and find_spec(sampler.needs) is None:
        raise OptionError(
            f"The sampler {sampler.name} needs the package {sampler.needs}.",
            f"Run `pip install {sampler.needs}`, or choose another sampler, such as DPM++ 2M SDE.",
        )
    check_schedule(schedule)
    cls = getattr(diffusers, sampler.scheduler)
    accepted = inspect.signature(cls.__init__).parameters
    noise = {key: config[key] for key in _NOISE_KEYS if key in config}
    # Models with trailing spacing (zero SNR, Turbo) must start at the last timestep.
    trailing = config.get("timestep_spacing") == "trailing"
    options = {
        "timestep_spacing": "trailing" if trailing else sampler.spacing,
        **sampler.options,
        **SCHEDULES[schedule],
    }
    unknown = [key for key in SCHEDULES[schedule] if key not in accepted]
    if unknown or (schedule not in ("Uniform", "SGM Uniform") and not sampler.schedules):
        raise OptionError(
            f"The sampler {sampler.name} cannot use the schedule type {schedule}.",
            "Choose Automatic.",
        )
    if noise.get("rescale_betas_zero_snr") and "rescale_betas_zero_snr" not in accepted:
        logger.warning("%s cannot start from pure noise; pictures may be greyish", sampler.name)
    arguments = {**noise, **options}
    return cls(**{key: value for key, value in arguments.items() if key in accepted})


def check_schedule(schedule: str) -> None:
    """Raise OptionError when a package that a schedule type needs is missing."""
    if schedule == "Beta" and find_spec("scipy") is None:
        raise OptionError(
            "The schedule type Beta needs the package scipy.",
            "Run `pip install scipy`, or choose another schedule type.",
        )


def _find(name: str, schedule: str) -> tuple[Sampler, str]:
    schedules = {key.lower(): key for key in SCHEDULES}
    # A1111 before 1.9 had the schedule type in the sampler's name.
    wanted = " ".join(name.split()).lower()
    for ending in sorted(schedules, key=len, reverse=True):
        if wanted.endswith(f" {ending}"):
            wanted, schedule = wanted[: -len(ending) - 1], ending
            break
    if schedule.lower() not in schedules:
        raise OptionError(
            f"There is no schedule type {schedule!r}.", f"Use one of: {', '.join(SCHEDULES)}."
        )
    known: dict[str, Sampler] = {}
    for sampler in SAMPLERS:
        for alias in (sampler.scheduler, sampler.name, *sampler.aliases):
            known.setdefault(alias.lower(), sampler)
    if wanted not in known:
        close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
        names = list(dict.fromkeys(known[alias].name for alias in close)) or sampler_names()
        raise OptionError(f"There is no sampler {name!r}.", f"Did you mean: {', '.join(names)}?")
    return known[wanted], schedules[schedule.lower()]

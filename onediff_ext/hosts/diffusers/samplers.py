"""The table of samplers by their A1111 names, and the diffusers scheduler of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sampler:
    """A sampler under its A1111 name.

    Args:
        name: As in A1111's infotext.
        scheduler: Class in diffusers.
        options: Arguments of the class for this sampler.
        schedule: A1111's meaning of the schedule type "Automatic".
        schedules: Whether it supports schedule types other than its own.
        spacing: diffusers' `timestep_spacing` for evenly spaced steps.
        needs: Extra package that must be installed, if any.
        aliases: Other names.
    """

    name: str
    scheduler: str
    options: dict[str, Any] = field(default_factory=dict)
    schedule: str = "Uniform"
    schedules: bool = True
    # k-diffusion spaces steps from the last training step to the first: "linspace".
    spacing: str = "linspace"
    needs: str | None = None
    aliases: tuple[str, ...] = ()


def _dpm(algorithm: str, order: int, **options: Any) -> dict[str, Any]:
    return {"algorithm_type": algorithm, "solver_order": order, **options}


_KARRAS = "Karras"
_MULTI = "DPMSolverMultistepScheduler"
_SINGLE = "DPMSolverSinglestepScheduler"
_SDE = "sde-dpmsolver++"

SAMPLERS = (
    Sampler("DPM++ 2M", _MULTI, _dpm("dpmsolver++", 2), _KARRAS),
    Sampler("DPM++ SDE", "DPMSolverSDEScheduler", schedule=_KARRAS, needs="torchsde"),
    Sampler("DPM++ 2M SDE", _MULTI, _dpm(_SDE, 2), "Exponential"),
    Sampler("DPM++ 2M SDE Heun", _MULTI, _dpm(_SDE, 2, solver_type="heun"), "Exponential"),
    Sampler("DPM++ 3M SDE", _MULTI, _dpm(_SDE, 3), "Exponential"),
    Sampler("DPM++ 2S", _SINGLE, _dpm("dpmsolver++", 2), _KARRAS),
    Sampler("Euler a", "EulerAncestralDiscreteScheduler", schedules=False, aliases=("k_euler_a",)),
    Sampler("Euler", "EulerDiscreteScheduler", aliases=("k_euler",)),
    Sampler("LMS", "LMSDiscreteScheduler", needs="scipy", aliases=("k_lms",)),
    Sampler("Heun", "HeunDiscreteScheduler", aliases=("k_heun",)),
    Sampler("DPM2", "KDPM2DiscreteScheduler", schedule=_KARRAS, aliases=("k_dpm_2",)),
    Sampler("DPM2 a", "KDPM2AncestralDiscreteScheduler", schedule=_KARRAS, aliases=("k_dpm_2_a",)),
    Sampler("DDIM", "DDIMScheduler", schedules=False, spacing="leading"),
    Sampler("DDPM", "DDPMScheduler", schedules=False, spacing="leading"),
    Sampler(
        "PLMS", "PNDMScheduler", {"skip_prk_steps": True}, schedules=False, spacing="leading",
        aliases=("PNDM",),
    ),
    Sampler("UniPC", "UniPCMultistepScheduler"),
    Sampler("DEIS", "DEISMultistepScheduler"),
    Sampler("LCM", "LCMScheduler", schedules=False, spacing="leading"),
    Sampler("TCD", "TCDScheduler", schedules=False, spacing="leading"),
)  # fmt: skip
"""All samplers, in the order of menus."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "Automatic": {},
    "Uniform": {},
    "Karras": {"use_karras_sigmas": True},
    "Exponential": {"use_exponential_sigmas": True},
    "SGM Uniform": {"timestep_spacing": "trailing"},
    "Beta": {"use_beta_sigmas": True},
}
"""A1111's schedule types → scheduler options. "Automatic" means the sampler's own."""

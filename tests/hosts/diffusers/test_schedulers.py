"""Samplers by their A1111 names."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.checkpoints.architectures import read_architecture
from onediff_ext.hosts.diffusers.samplers import SAMPLERS
from onediff_ext.hosts.diffusers.schedulers import (
    infotext_names,
    make_scheduler,
    sampler_names,
)

NOISE = read_architecture("sd1").noise


def needs(name: str) -> str | None:
    return next(one.needs for one in SAMPLERS if one.name == name)


@pytest.mark.parametrize("name", sampler_names())
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_denoises(name: str, prediction: str) -> None:
    """With a perfect model, every sampler reaches the picture."""
    package = needs(name)
    if package and find_spec(package) is None:
        with pytest.raises(OptionError, match=package):
            make_scheduler(name, NOISE)
        return
    scheduler = make_scheduler(name, {**NOISE, "prediction_type": prediction})
    assert scheduler.config.prediction_type == prediction
    generator = torch.Generator().manual_seed(0)
    picture = torch.randn(1, 4, 8, 8, generator=generator)
    latent = torch.randn(1, 4, 8, 8, generator=generator) * scheduler.init_noise_sigma
    levels = scheduler.alphas_cumprod
    scheduler.set_timesteps(12)
    for timestep in scheduler.timesteps:
        scaled = scheduler.scale_model_input(latent, timestep)
        level = _level(levels, timestep)
        noise = (scaled - level.sqrt() * picture) / (1 - level).sqrt()
        answer = noise
        if prediction == "v_prediction":
            answer = level.sqrt() * noise - (1 - level).sqrt() * picture
        latent = scheduler.step(answer, timestep, latent).prev_sample
    assert torch.allclose(latent, picture, atol=0.35), (latent - picture).abs().max()


def _level(levels: torch.Tensor, timestep: Any) -> torch.Tensor:
    """Signal level at a timestep, also between two training steps."""
    position = float(timestep)
    low = int(position)
    high = min(low + 1, len(levels) - 1)
    sigma = ((1 - levels) / levels) ** 0.5
    log = sigma.log()
    here = (log[low] + (position - low) * (log[high] - log[low])).exp()
    return 1 / (1 + here**2)


@pytest.mark.parametrize(
    ("name", "schedule", "expected"),
    [
        ("Euler a", "Automatic", ("Euler a", "Automatic")),
        ("DPM++ 2M Karras", "Automatic", ("DPM++ 2M", "Karras")),
        ("dpm++ 2m sde karras", "Automatic", ("DPM++ 2M SDE", "Karras")),
        ("Euler SGM Uniform", "Automatic", ("Euler", "SGM Uniform")),
        ("DPM++ SDE", "karras", ("DPM++ SDE", "Karras")),
        ("EulerDiscreteScheduler", "Automatic", ("Euler", "Automatic")),
        ("DPMSolverMultistepScheduler", "Automatic", ("DPM++ 2M", "Automatic")),
        ("PNDM", "Automatic", ("PLMS", "Automatic")),
        ("k_euler_a", "Automatic", ("Euler a", "Automatic")),
    ],
)
def test_infotext(name: str, schedule: str, expected: tuple[str, str]) -> None:
    assert infotext_names(name, schedule) == expected


def test_karras_is_what_automatic_means_for_dpm() -> None:
    assert make_scheduler("DPM++ 2M", NOISE).config.use_karras_sigmas
    assert make_scheduler("DPM++ 2M Karras", NOISE).config.use_karras_sigmas
    assert not make_scheduler("DPM++ 2M", NOISE, "Uniform").config.use_karras_sigmas
    assert not make_scheduler("Euler", NOISE).config.use_karras_sigmas


def test_a_sampler_leaves_nothing_for_the_next() -> None:
    first = make_scheduler("DPM++ 2M Karras", NOISE)
    again = make_scheduler("Euler", first.config)
    fresh = make_scheduler("Euler", NOISE)
    # diffusers itself records which entries are defaults.
    assert {**again.config, "_use_default_values": 0} == {**fresh.config, "_use_default_values": 0}


def test_euler_steps_are_a1111s() -> None:
    # k-diffusion: sigmas at 20 timesteps evenly from 999 to 0, then 0.
    scheduler = make_scheduler("Euler", NOISE)
    scheduler.set_timesteps(20)
    assert scheduler.sigmas[0] == pytest.approx(14.6146, abs=1e-3)
    assert scheduler.sigmas[-2] == pytest.approx(0.0292, abs=1e-4)
    assert scheduler.sigmas[-1] == 0


def test_models_that_start_from_pure_noise() -> None:
    config = {**NOISE, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    scheduler = make_scheduler("Euler", config)
    assert scheduler.config.timestep_spacing == "trailing"
    scheduler.set_timesteps(4)
    assert scheduler.sigmas[0] > 1000


@pytest.mark.parametrize(
    ("name", "schedule", "message", "hint"),
    [
        ("Euler b", "Automatic", "no sampler 'Euler b'", "Euler"),
        ("DPM++ 2N", "Automatic", "no sampler", "DPM++ 2M"),
        ("zzzz", "Automatic", "no sampler", "DDIM"),
        ("Euler", "Karos", "no schedule type", "Karras"),
        ("DDIM", "Karras", "cannot use the schedule type Karras", "Automatic"),
        ("DDIM Karras", "Automatic", "cannot use the schedule type Karras", "Automatic"),
    ],
)
def test_refusals(name: str, schedule: str, message: str, hint: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        make_scheduler(name, NOISE, schedule)
    assert hint in caught.value.hint


def test_beta_needs_scipy() -> None:
    if find_spec("scipy") is not None:
        assert make_scheduler("Euler", NOISE, "Beta").config.use_beta_sigmas
        return
    with pytest.raises(OptionError, match="scipy"):
        make_scheduler("Euler", NOISE, "Beta")


def test_lists() -> None:
    assert len(set(sampler_names())) == len(sampler_names())

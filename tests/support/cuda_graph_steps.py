"""Single steps of a compiled pipeline's UNet on noise, replayed and eager."""

from __future__ import annotations

from typing import Any

import torch

from onediff_ext.hosts.diffusers.compile import compiled_state
from onediff_ext.hosts.diffusers.probe import unet_inputs


def inputs(unet: Any, height: int = 8, width: int = 12, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return unet_inputs(unet, generator, height_latent=height, width_latent=width)


def captured(pipe: Any) -> Any:
    return compiled_state(pipe).components[0].captured


@torch.no_grad()
def step(pipe: Any, seed: int = 0, **size: int) -> torch.Tensor:
    return pipe.unet(**inputs(pipe.unet, seed=seed, **size)).sample


@torch.no_grad()
def eager(pipe: Any, seed: int = 0, **size: int) -> torch.Tensor:
    with compiled_state(pipe).components[0].paused():
        return step(pipe, seed, **size)


def settle(pipe: Any, **size: int) -> None:
    """Until the size is replayed: kinds built, checked, recorded, checked twice."""
    reasons = []
    for seed in range(6):
        step(pipe, seed, **size)
        reasons.append(captured(pipe).reason)
    assert not reasons[-1], reasons


def assert_right(pipe: Any, seed: int = 99, **size: int) -> None:
    torch.testing.assert_close(
        step(pipe, seed, **size), eager(pipe, seed, **size), rtol=1e-4, atol=1e-5
    )

"""The WebUIs' denoiser and samplers, as far as what they tell an extension before each prediction.

All three hosts call ``on_cfg_denoiser`` with the denoiser, then the UNet, in one call or several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

# (pictures, tokens) of each call of the UNet for one prediction.
Layout = Sequence[tuple[int, int]]
CFG: Layout = [(2, 77)]
SPLIT: Layout = [(1, 154), (1, 77)]
"""A long prompt with a short negative one, in A1111."""


class Entry(NamedTuple):
    """`ScheduledPromptConditioning`."""

    end_at_step: int
    cond: Any = None


class FakeWrapper:
    """k-diffusion's wrapper of the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class FakeDenoiser:
    """`CFGDenoiser` with its sampler, at the beginning of a run."""

    def __init__(self, p: Any, sampler: str, total: int, prompt: Sequence[Entry]) -> None:
        self.p, self.step, self.total_steps = p, 0, total
        self.inner_model = FakeWrapper()
        part = SimpleNamespace(schedules=list(prompt))
        self.sampler = SimpleNamespace(
            config=SimpleNamespace(name=sampler),
            sampler_extra_args={
                "cond": SimpleNamespace(batch=[[part]]),
                "uncond": [[Entry(total)]],
            },
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def sample(
    before_step: Callable[[Any], None],
    unet: Callable[..., torch.Tensor],
    p: Any,
    *,
    sampler: str = "Euler",
    calls: int = 1,
    layout: Callable[[int], Layout] = lambda _: CFG,
    size: tuple[int, int] = (17, 9),
    prompt: Sequence[Entry] = (Entry(10_000),),
    keep: float = 1.0,
    before_call: Callable[[int], None] = lambda _: None,
    tiles: Callable[[int], Sequence[slice]] = lambda _: [slice(None)],
    patch: Callable[[FakeDenoiser], None] = lambda _: None,
    **arguments: Any,
) -> torch.Tensor:
    """One run of a sampler.

    Args:
        before_step: What the host calls.
        unet: ``unet(x, timesteps, context, number, **arguments)``.
        p: The job; `steps` are its whole schedule.
        calls: Predictions for each step, as Heun has two.
        layout: Number of a prediction → its calls of the UNet.
        size: Of the latent; odd at each level of the UNet.
        keep: Image to image draws this share of the steps.
        before_call: Called with the number of each prediction after `before_step`.
        tiles: Number of a prediction → the rows of the latent that are drawn on their own.
        patch: Changes the denoiser before each prediction, as an extension does.

    Returns:
        The latent [1, 4, h, w].
    """
    count = max(1, int(p.steps * keep)) * calls
    denoiser = FakeDenoiser(p, sampler, count, prompt)
    x = torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(3))
    for number in range(count):
        patch(denoiser)
        before_step(SimpleNamespace(denoiser=denoiser))
        before_call(number)
        found = torch.zeros_like(x)  # of all calls, which get the same latent
        for rows in tiles(number):
            for part, (pictures, tokens) in enumerate(layout(number)):
                noise = torch.Generator().manual_seed(10 + part)
                context = torch.randn(pictures, tokens, 24, generator=noise)
                timesteps = torch.full((pictures,), 900.0 - 20 * number)
                given = x[:, :, rows].expand(pictures, -1, -1, -1).clone()
                drawn = unet(given, timesteps, context, **arguments)
                found[:, :, rows] += drawn.mean(0, keepdim=True)
        x = x - 0.02 * found
        denoiser.step += 1
    return x

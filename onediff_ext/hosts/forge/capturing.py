"""What Forge does in a UNet's forward that a CUDA graph cannot record, done in another way.

Without this such a UNet would run through its blocks' graphs, one after another: right, but
slower where launching takes longer than computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch


class TimestepEmbedding:
    """Stands for the host's ``timestep_embedding``, which makes its frequencies on the CPU and
    copies them to the GPU at each call; here they are copied once.

    The result is the host's own, bit for bit: for each device and width the host's function is
    called too the first time, and goes on being called where it gives anything else.

    Source: timestep_embedding in Forge's backend/nn/unet.py.

    Args:
        own: The host's function.
    """

    def __init__(self, own: Callable[..., torch.Tensor]) -> None:
        self.own = own
        # Captures point into these, so they live as long as the extension.
        self._frequencies: dict[Hashable, torch.Tensor | None] = {}

    def __call__(
        self,
        timesteps: torch.Tensor,
        dim: int,
        max_period: float = 10000,
        repeat_only: bool = False,
    ) -> torch.Tensor:
        # timesteps [B] → [B, dim]
        if repeat_only:
            return self.own(timesteps, dim, max_period, repeat_only)
        key = (timesteps.device, timesteps.dtype, dim, max_period)
        if key not in self._frequencies:
            expected = self.own(timesteps, dim, max_period)
            frequencies = _frequencies(dim, max_period).to(timesteps.device)
            equal = torch.equal(_embed(timesteps, frequencies, dim), expected)
            self._frequencies[key] = frequencies if equal else None
            return expected
        known = self._frequencies[key]
        if known is None:
            return self.own(timesteps, dim, max_period)
        return _embed(timesteps, known, dim)


def without_controlnet(
    _model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before the UNet: leaves out the ControlNet that Forge hands on to it, though the UNet
    takes no notice of it: an object of any kind is nothing that a capture can know to be the same.
    What the ControlNet has computed are tensors in ``control``."""
    return tuple(args), {name: v for name, v in kwargs.items() if name != "control_model"}


def _frequencies(dim: int, max_period: float) -> torch.Tensor:
    half = dim // 2
    with torch.inference_mode(False):
        steps = torch.arange(start=0, end=half, dtype=torch.float32)
        return torch.exp(-math.log(max_period) * steps / half)


def _embed(timesteps: torch.Tensor, frequencies: torch.Tensor, dim: int) -> torch.Tensor:
    args = timesteps[:, None].float() * frequencies[None]
    embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
    if dim % 2:
        embedding = torch.cat([embedding, torch.zeros_like(embedding[:, :1])], dim=-1)
    return embedding

"""What hosts do in a UNet's forward that a CUDA graph cannot record, done in another way.

Without this such a UNet would run through its blocks' graphs, one after another: right, but
slower where launching takes longer than computing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.patches import Patches


class TimestepEmbedding:
    """Stands for the host's ``timestep_embedding``, which makes its frequencies on the CPU and
    copies them to the GPU at each call; here they are copied once.

    The result is the host's own, bit for bit: for each device and width the host's function is
    called too the first time, and goes on being called where it gives anything else.

    Source: timestep_embedding in Forge's backend/nn/unet.py and in sgm's diffusionmodules/util.py.

    Args:
        own: The host's function.
        settings: What of the host's settings decides its result.
    """

    def __init__(
        self, own: Callable[..., torch.Tensor], settings: Callable[[], Hashable] = tuple
    ) -> None:
        self.own, self._settings = own, settings
        # Captures point into these, so they live as long as the extension.
        self._known: dict[Hashable, tuple[torch.Tensor, torch.dtype] | None] = {}

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
        key = (timesteps.device, timesteps.dtype, dim, max_period, self._settings())
        if key not in self._known:
            expected = self.own(timesteps, dim, max_period)
            frequencies = _frequencies(dim, max_period).to(timesteps.device)
            found = _embed(timesteps, frequencies, dim).to(expected.dtype)
            equal = torch.equal(found, expected)
            self._known[key] = (frequencies, expected.dtype) if equal else None
            return expected
        known = self._known[key]
        if known is None:
            return self.own(timesteps, dim, max_period)
        frequencies, dtype = known
        return _embed(timesteps, frequencies, dim).to(dtype)


class TimestepEmbeddings:
    """One for each function of a host, whatever models come and go.

    Args:
        settings: As `TimestepEmbedding` takes them.
    """

    def __init__(self, settings: Callable[[], Hashable] = tuple) -> None:
        self._settings = settings
        self._made: dict[Callable[..., Any], TimestepEmbedding] = {}

    def install(self, patches: Patches, unet: nn.Module) -> None:
        """Have the module of a UNet's class call ours; `patches` takes it back."""
        home = sys.modules[type(unet).__module__]
        own = vars(home).get("timestep_embedding")
        if callable(own) and not isinstance(own, TimestepEmbedding):
            ours = self._made.setdefault(own, TimestepEmbedding(own, self._settings))
            patches.set(home, "timestep_embedding", ours)


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

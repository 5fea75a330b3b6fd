"""Timestep embeddings that a CUDA graph can record, in place of the hosts' own function.

The hosts' function copies from the CPU, which cannot be recorded. Without this, such a UNet runs
through its blocks' graphs one after another. That is correct, but slower where launching takes
longer than computing.
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
    """Replaces a host's ``timestep_embedding``.

    The host's function makes its frequencies on the CPU and copies them to the GPU at each call.
    This copies them once. The result is the host's own, bit for bit: the first call for each device
    and width also runs the host's function, and later calls go on running it where the two differ.

    Source: timestep_embedding in Forge's backend/nn/unet.py and in sgm's diffusionmodules/util.py.

    Args:
        own: The host's function.
        settings: Returns the settings of the host that decide the function's result.
    """

    def __init__(
        self, own: Callable[..., torch.Tensor], settings: Callable[[], Hashable] = tuple
    ) -> None:
        self.own, self._settings = own, settings
        # CUDA graphs point into these, so they live as long as the extension.
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
    """One `TimestepEmbedding` for each function of a host, across models that come and go.

    Args:
        settings: As `TimestepEmbedding` takes them.
    """

    def __init__(self, settings: Callable[[], Hashable] = tuple) -> None:
        self._settings = settings
        self._made: dict[Callable[..., Any], TimestepEmbedding] = {}
        self._counts: dict[Hashable, EmbeddedCounts] = {}

    def install(self, patches: Patches, unet: nn.Module) -> None:
        """Replace the function in the Python module of a UNet's class; `patches` undoes it."""
        home = sys.modules[type(unet).__module__]
        own = vars(home).get("timestep_embedding")
        if callable(own) and not isinstance(own, TimestepEmbedding):
            ours = self._made.setdefault(own, TimestepEmbedding(own, self._settings))
            patches.set(home, "timestep_embedding", ours)

    def install_on(self, patches: Patches, embedder: nn.Module) -> None:
        """Replace the static method of a module; `patches` undoes it.

        Args:
            patches: Makes the change.
            embedder: A ``TimestepEmbedder``, such as SD3's.
        """
        own: Callable[..., torch.Tensor] = getattr(type(embedder), "timestep_embedding")  # noqa: B009
        ours = self._made.setdefault(own, TimestepEmbedding(own, self._settings))
        patches.set(embedder, "timestep_embedding", ours)

    def install_counts(self, patches: Patches, model: nn.Module, device: torch.device) -> None:
        """Replace the function that embeds counts, in the Python module of a model's class.

        Args:
            patches: Makes the change.
            model: Such as Chroma's transformer.
            device: Where it computes.
        """
        home = sys.modules[type(model).__module__]
        own = vars(home)["timestep_embedding"]
        if not isinstance(own, EmbeddedCounts):
            ours = self._counts.setdefault((own, device), EmbeddedCounts(own, device))
            patches.set(home, "timestep_embedding", ours)


class EmbeddedCounts:
    """Replaces a ``timestep_embedding`` that is also asked to embed counts, which lie on the CPU.

    Forge's Chroma numbers its modulations so. The host copies the result to the GPU at each step,
    which cannot be recorded; here it lies there already.

    Args:
        own: The host's function.
        device: Where the model is.
    """

    def __init__(self, own: Callable[..., torch.Tensor], device: torch.device) -> None:
        self.own, self.device = own, device
        # CUDA graphs point into these, so they live as long as the extension.
        self._known: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, counts: torch.Tensor, dim: int, *more: float) -> torch.Tensor:
        # counts [N] → [N, dim]
        if counts.device == self.device or counts.device.type != "cpu":
            return self.own(counts, dim, *more)
        key = (counts.dtype, len(counts), dim, more)
        known = self._known.get(key)
        if known is None or not torch.equal(known[0], counts):
            known = (counts.clone(), self.own(counts, dim, *more).to(self.device))
            self._known[key] = known
        return known[1]


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

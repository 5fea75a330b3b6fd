"""VAEs and memories that are short of something, for tests of how the VAE is looked after."""

from __future__ import annotations

from typing import Any

import torch

from onediff_ext.hosts.diffusers.vae.vae_memory import DeviceMemory
from tests.support import models


class MeasuredMemory(DeviceMemory):
    """A device that says how much is free, more once captures are given up.

    Args:
        free: Bytes; None is a device that does not tell.
        in_captures: What captures hold.
    """

    def __init__(self, free: int | None, in_captures: int = 0) -> None:
        self._free, self._in_captures = free, in_captures
        self.captures_given_up = 0

    def free_bytes(self, device: torch.device) -> int | None:
        return self._free

    def bytes_of_captures(self) -> int:
        return self._in_captures

    def give_up_captures(self) -> None:
        assert self._free is not None
        self._free += self._in_captures
        self._in_captures = 0
        self.captures_given_up += 1

    def free_caches(self) -> None:
        pass


class LimitedPart:
    """A forward pre-hook for a VAE's encoder or decoder: runs out of memory above a size.

    Args:
        most: Pixels or latent cells, of all pictures of a call, that it can do.
        error: What it raises above.

    Attributes:
        sizes: (pictures, height, width) of each call that it could do.
        refused: Of each that it could not.
    """

    def __init__(self, most: int, error: BaseException | None = None) -> None:
        self._most = most
        self._error = error or torch.OutOfMemoryError("CUDA out of memory (a stand-in)")
        self.sizes: list[tuple[int, ...]] = []
        self.refused: list[tuple[int, ...]] = []

    def __call__(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        size = (args[0].shape[0], *args[0].shape[-2:])
        if size[0] * size[1] * size[2] > self._most:
            self.refused.append(size)
            raise self._error
        self.sizes.append(size)


def overflowing_vae(part: str, seed: int = 0) -> Any:
    """A VAE whose "encoder" or "decoder" has numbers beyond float16's in its middle, which the
    next norm brings back: with a wider range all is well."""
    vae = models.vae(seed=seed)
    getattr(vae, part).mid_block.resnets[0].conv2.weight.mul_(1e5)
    return vae


def latents(pictures: int = 1, height: int = 8, width: int = 8, seed: int = 0) -> torch.Tensor:
    """Noise for a decoder, [B, 4, height, width] in cells."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(pictures, 4, height, width, generator=generator)

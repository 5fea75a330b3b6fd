"""Sessions with a store of their own, on a small UNet; nothing is left running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers.compile import new_session
from onediff_ext.service.session import Session
from tests import models

torch.set_num_threads(1)


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Sessions of the eager backend over one new store, closed at the end."""
    opened: list[Session] = []

    def make(**options: object) -> Session:
        chosen = {
            "backend": "eager",
            "store": tmp_path / "store",
            "workers": 1,
            "channels_last": False,  # so that eager stays what it was, to the last bit
            **options,
        }
        opened.append(new_session(CompileOptions.parse(chosen)))
        return opened[-1]

    yield make
    for session in opened:
        session.close()


class SmallUNet:
    """A UNet in something that `compile_pipe` takes for a pipeline; ten kinds."""

    def __init__(self, seed: int = 0) -> None:
        self.unet: Any = models.unet(seed=seed)

    def __call__(self, height_latent: int = 16, width_latent: int = 16) -> torch.Tensor:
        """One forward; noise [2, 4, h, w]."""
        inputs = models.unet_inputs(self.unet, 2, height_latent, width_latent)
        with torch.no_grad():
            output: torch.Tensor = self.unet(**inputs).sample
        return output

    @property
    def pipe(self) -> Any:
        """What `compile_pipe` takes."""
        if not hasattr(self, "_pipe"):
            self._pipe = SimpleNamespace(unet=self.unet)
        return self._pipe


@pytest.fixture
def small() -> SmallUNet:
    """A small UNet that nobody has compiled."""
    return SmallUNet()

"""Sessions with a store of their own, on a small UNet; nothing is left running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.building.builder import Builder
from onediff_ext.building.worker_process import Built, WorkerProcess
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.priority import GivingWay
from onediff_ext.hosts.diffusers.compile import new_session
from onediff_ext.session.session import Session
from tests.support import models

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _do_not_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests keep all cores busy: workers that give way to them would hardly get a turn."""
    monkeypatch.setattr(GivingWay, "tell", lambda self, pid, drawing: None)


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


class InstantWorker(WorkerProcess):
    """Builds for the eager backend, whose graph is the program itself, without a process."""

    pid = None

    def build(self, program: bytes, device: str, timeout_s: float) -> Built:
        """The program, a little later."""
        time.sleep(0.02)
        return Built(program, 0.02)

    def prove(self, payload: bytes, program: bytes, device: str, timeout_s: float) -> None:
        """Every graph is sound here."""

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds without worker processes, for tests in which these do not matter."""
    monkeypatch.setattr(
        Builder, "new_worker", lambda self, cache, in_background: InstantWorker("eager", cache)
    )


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

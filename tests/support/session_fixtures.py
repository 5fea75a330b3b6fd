"""Sessions with a store of their own, on a small UNet; nothing is left running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.worker_process import Built, WorkerProcess
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.priority import SessionPriorities
from onediff_ext.hosts.diffusers.compile import new_session
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.kept_exports import kept_exports
from tests.support.quick_builds import quick_loads

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def workers_at_full_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers do not give way to the tests, which keep all cores busy."""
    monkeypatch.setattr(SessionPriorities, "tell", lambda self, pid, drawing, share=0.0: None)


@pytest.fixture
def exports() -> Iterator[None]:
    """Each kind is traced once in a run, and loaded once. Tests of the tracing replace this."""
    with kept_exports(), quick_loads():
        yield


@pytest.fixture
def open_session(tmp_path: Path, exports: None) -> Iterator[Callable[..., Session]]:
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
        """Return the program, 20 ms later."""
        time.sleep(0.02)
        return Built(program, 0.02)

    def check_load(self, payload: bytes, program: bytes, device: str, timeout_s: float) -> None:
        """Pass every stored graph."""

    def close(self) -> None:
        """Do nothing: no process was started."""


@pytest.fixture
def instant_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds finish at once, without worker processes."""
    monkeypatch.setattr(
        BuildContext,
        "new_worker",
        lambda self, folder, in_background: InstantWorker("eager", folder),
    )


class SmallUNet:
    """A UNet with ten block kinds, in a stand-in for a pipeline.

    Args:
        seed: Of its weights.
        config: Of the UNet, such as one width for all levels, which makes few kinds.
    """

    def __init__(self, seed: int = 0, **config: Any) -> None:
        self.unet: Any = models.unet(seed=seed, **config)

    def __call__(self, height_latent: int = 16, width_latent: int = 16) -> torch.Tensor:
        """One forward; noise [2, 4, h, w]."""
        inputs = models.unet_inputs(self.unet, 2, height_latent, width_latent)
        with torch.no_grad():
            output: torch.Tensor = self.unet(**inputs).sample
        return output

    @property
    def pipe(self) -> Any:
        """The keyword arguments of `compile_pipe`."""
        if not hasattr(self, "_pipe"):
            self._pipe = SimpleNamespace(unet=self.unet)
        return self._pipe


@pytest.fixture
def small() -> SmallUNet:
    """A small UNet that is not compiled yet."""
    return SmallUNet()

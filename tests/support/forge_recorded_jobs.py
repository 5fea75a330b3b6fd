"""Jobs of a Forge's stand-in whose UNet is recorded on a CPU, and their steps."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_stand_in import FakeProcessing, ForgeStandIn
from tests.support.strict_recorder import StrictRecorder


@contextmanager
def recorded_job(
    graphs: GraphsForJobs, recorder: StrictRecorder, store: Path, limit: int = 64
) -> Iterator[FakeProcessing]:
    """A job whose session records on a CPU, up to `limit` forwards."""
    options = CompileOptions(backend="eager", build="wait", store=store, workers=1)
    p = FakeProcessing()
    graphs.begin(p, options)
    assert graphs.session is not None
    graphs.session.cuda_graphs = CudaGraphCache(recorder, limit)
    graphs.before_sampling(p)
    yield p
    graphs.end(p)


def step(
    host: ForgeStandIn,
    seed: int,
    timestep: float = 321.0,
    control: float = 0,
    size: tuple[int, int] = (8, 8),
    batch: int = 2,
    **more: Any,
) -> torch.Tensor:
    """One step as the hosts' samplers ask for it, with what a ControlNet adds in the middle."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 4, *size, generator=noise)
    context = torch.randn(batch, 77, 24, generator=noise)
    options: dict[str, Any] = {"cond_or_uncond": [1, 0], "sigmas": torch.full((1,), 2.5)}
    if host.name == "reforge":
        options["uuids"] = [uuid.uuid4(), uuid.uuid4()]
    with torch.inference_mode():
        result: torch.Tensor = host.unet(
            x,
            torch.full((batch,), timestep),
            context=context,
            control={"middle": [control * torch.ones(batch, 32, *size)]} if control else None,
            transformer_options=options,
            **more,
        )
        return result.clone()


def unet_of(graphs: GraphsForJobs) -> Any:
    """The UNet's component."""
    return next(a for a in graphs.models.attached if a.component.name == "unet").component


def captured(graphs: GraphsForJobs) -> Any:
    return unet_of(graphs).captured


def assert_right(host: ForgeStandIn, graphs: GraphsForJobs, seed: int, **more: Any) -> None:
    found = step(host, seed, **more)
    with unet_of(graphs).paused():
        expected = step(host, seed, **more)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def settle(host: ForgeStandIn, **more: Any) -> None:
    for seed in range(7):
        step(host, seed, **more)

"""CUDA graphs of A1111's UNet: they outlive a job, and what a GPU cannot record is replaced.

CUDA graphs need a GPU. A recorder for CPUs records what they record, and the timestep embedding
fails while it is recorded where a GPU would.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.a1111.host import A1111Host
from onediff_ext.hosts.timestep_embedding import TimestepEmbedding
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support import ldm_stand_in
from tests.support.a1111_stand_in import A1111StandIn, FakeProcessing, a1111
from tests.support.forge_blocks_stand_in import embed_from_the_cpu
from tests.support.strict_recorder import StrictRecorder

HOME = "ldm.modules.diffusionmodules.openaimodel"


def cast_result(timesteps: torch.Tensor, dim: int, *others: Any, **named: Any) -> torch.Tensor:
    """A1111's wrapper, which casts the output to the UNet's type."""
    dtype: torch.dtype = sys.modules["modules.devices"].dtype_unet
    return embed_from_the_cpu(timesteps, dim, *others, **named).to(dtype)


class EmbeddingUNet(ldm_stand_in.UNetModel):
    """A UNet that calls its module's own ``timestep_embedding`` first, like real ones."""

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor) -> Any:
        embedding = vars(sys.modules[HOME])["timestep_embedding"](timesteps, 4)
        return super().forward(x, timesteps + 100 * embedding.mean(1).float(), context)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[A1111StandIn]:
    with a1111() as stand_in:
        monkeypatch.setattr(sys.modules[HOME], "timestep_embedding", cast_result, raising=False)
        ldm_stand_in.live_in(EmbeddingUNet, HOME)
        stand_in.model.model.diffusion_model.__class__ = EmbeddingUNet
        yield stand_in


@pytest.fixture
def graphs(host: A1111StandIn) -> GraphsForJobs:
    return GraphsForJobs(A1111Host())


@pytest.fixture
def options(tmp_path: Path) -> CompileOptions:
    return CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1)


def draw(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    options: CompileOptions,
    recorder: StrictRecorder,
    steps: int = 7,
) -> torch.Tensor:
    """A job of some steps; what the last one gave."""
    p = FakeProcessing()
    graphs.begin(p, options)
    assert graphs.session is not None
    if graphs.session.cuda_graphs._recorder is not recorder:
        graphs.session.cuda_graphs = CudaGraphCache(recorder)
    graphs.before_sampling(p)
    for _ in range(steps):
        found = host.unet().clone()
    (captured,) = [a.component.captured for a in graphs.models.attached if a.component.captured]
    assert captured.reason == ""
    graphs.end(p)
    return found


def test_a_capture_serves_the_next_jobs(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    options: CompileOptions,
    recorder: StrictRecorder,
) -> None:
    expected = host.unet()
    for _ in range(3):
        found = draw(host, graphs, options, recorder)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert recorder.recorded == 1
    assert graphs.session is not None
    assert list(graphs.session.cuda_graphs.dropped) == []


def test_a_capture_draws_with_another_checkpoints_weights(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    options: CompileOptions,
    recorder: StrictRecorder,
) -> None:
    """A1111 writes them into the same Parameters."""
    before = draw(host, graphs, options, recorder)
    host.load_weights(3)
    expected = host.unet()
    assert not torch.allclose(before, expected, rtol=1e-2)
    found = draw(host, graphs, options, recorder)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert recorder.recorded == 1


def test_a_capture_draws_with_loras_that_come_and_go(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    options: CompileOptions,
    recorder: StrictRecorder,
) -> None:
    """They are merged in place, and noted on the layers."""
    drawn = []
    for strength in (0.0, 0.3, 0.6, 0.0):
        host.lora.strength = strength
        expected = host.unet()
        drawn.append(draw(host, graphs, options, recorder))
        torch.testing.assert_close(drawn[-1], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(drawn[0], drawn[1], rtol=1e-2)
    assert recorder.recorded == 1


def test_an_attribute_that_decides_something_is_a_change(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    options: CompileOptions,
    recorder: StrictRecorder,
) -> None:
    for scale in ("plain", "plain", "other"):
        host.model.model.diffusion_model.note = scale
        draw(host, graphs, options, recorder)
        assert recorder.recorded == (2 if scale == "other" else 1), scale


def test_a_layer_that_is_new_is_looked_after(host: A1111StandIn) -> None:
    """The hook for pending LoRAs is the same in each job; the layers need not be."""
    from onediff_ext.engine.patches import Patches

    unet, ours = host.model.model.diffusion_model, A1111Host()
    hooks = []
    for _ in range(2):
        with Patches() as patches:
            ours.attach(patches, unet, ComponentId(Role.UNET))
            (hook,) = unet._forward_pre_hooks.values()
            hooks.append(hook)
            assert {id(layer) for layer in hook._layers} >= {id(unet.out), id(unet.time_embed)}
        unet.out = nn.Conv2d(32, 4, 3, padding=1)
    assert hooks[0] is hooks[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_timesteps_are_embedded_exactly_as_by_the_host(
    host: A1111StandIn, dtype: torch.dtype
) -> None:
    from onediff_ext.engine.patches import Patches

    devices, home = sys.modules["modules.devices"], sys.modules[HOME]
    with Patches() as patches:
        A1111Host().attach(patches, host.model.model.diffusion_model, ComponentId(Role.UNET))
        ours = vars(home)["timestep_embedding"]
        assert isinstance(ours, TimestepEmbedding)
        for unet_dtype in (dtype, torch.bfloat16):  # a checkpoint or a setting may change it
            devices.dtype_unet = unet_dtype  # type: ignore[attr-defined]
            for timesteps in (torch.tensor([321.5, 0.0]), torch.tensor([999.0], dtype=dtype)):
                for _ in range(2):
                    found, expected = ours(timesteps, 320), cast_result(timesteps, 320)
                    assert found.dtype == expected.dtype == unet_dtype
                    assert torch.equal(found, expected)
    assert vars(home)["timestep_embedding"] is cast_result


def test_the_vae_is_tried_as_the_host_calls_it(
    host: A1111StandIn, graphs: GraphsForJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It encodes under autocast, and decodes without; these are other kinds."""
    devices, seen = sys.modules["modules.devices"], []
    monkeypatch.setattr(devices, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    for name in ("encoder", "decoder"):
        getattr(host.model.first_stage_model, name).register_forward_pre_hook(
            lambda *_, name=name: seen.append((name, torch.is_autocast_enabled("cpu")))
        )
    graphs.host.vae_step()
    assert seen == [("encoder", True), ("decoder", False)]


def move_out_and_back(host: A1111StandIn) -> None:
    """As --medvram does between jobs: the same Parameters, at other addresses."""
    for parameter in host.model.model.parameters():
        parameter.data = parameter.data.clone()


def test_with_medvram_a_capture_is_made_in_the_first_step_of_each_job(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    options: CompileOptions,
    recorder: StrictRecorder,
) -> None:
    host.model.lowvram = True
    expected = host.unet()
    draw(host, graphs, options, recorder)
    for job in (2, 3, 4):
        move_out_and_back(host)
        found = draw(host, graphs, options, recorder, steps=3)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert recorder.recorded == job
        # The first step is recorded and compared with; the others are replays and nothing else.
        assert recorder.forwards[-1].replays == 3
    assert recorder.freed == 0

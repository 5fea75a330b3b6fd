"""A UNet whose forward is ControlNet's: its parts and the network's become CUDA graphs.

CUDA graphs need a GPU; a recorder for CPUs records what they record.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.captured_forward import CapturedForward
from onediff_ext.hosts.a1111.host import A1111Host
from onediff_ext.session.model_component import Component
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.a1111_stand_in import A1111StandIn, FakeProcessing, a1111
from tests.support.ldm_stand_in import BasicTransformerBlock, ResBlock, live_in
from tests.support.strict_recorder import StrictRecorder

HOME = "ldm.modules.diffusionmodules.openaimodel"
PARTS, NETWORK_PARTS = 4, 3  # that hold blocks


class TimestepEmbedSequential(nn.Sequential):
    """x [B, C, H, W], emb [B, E], context [B, M, D] → [B, C', H, W]."""

    def forward(self, x: torch.Tensor, emb: torch.Tensor, context: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for layer in self:
            if isinstance(layer, ResBlock):
                x = layer(x, emb)
            elif isinstance(layer, BasicTransformerBlock):
                tokens = layer(x.flatten(2).transpose(1, 2), context)
                x = tokens.transpose(1, 2).unflatten(2, x.shape[2:])
            else:
                x = layer(x)
        return x


class ControlNet(nn.Module):
    """Of the extension's own class, made of the UNet's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embed = nn.Linear(1, 12)
        self.input_blocks = nn.ModuleList(
            [
                TimestepEmbedSequential(nn.Conv2d(4, 16, 3, padding=1)),
                TimestepEmbedSequential(ResBlock(16, 12, 32), BasicTransformerBlock(32, 4, 24)),
                TimestepEmbedSequential(ResBlock(32, 12, 32)),
            ]
        )
        self.middle_block = TimestepEmbedSequential(BasicTransformerBlock(32, 4, 24))

    def forward(
        self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor
    ) -> list[torch.Tensor]:
        emb, outs = self.time_embed(timesteps[:, None] / 1000), []
        for module in (*self.input_blocks, self.middle_block):
            x = module(x, emb, context)
            outs.append(x)
        return outs


class UNetModel(ControlNet):
    """It adds each output of the first half to the second, as UNets do."""

    num_classes = None

    def __init__(self) -> None:
        super().__init__()
        self.output_blocks = nn.ModuleList([TimestepEmbedSequential(ResBlock(64, 12, 16))])
        self.out = nn.Sequential(nn.GroupNorm(8, 16), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1))

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        _, _, skip, h = super().forward(x, timesteps, context)
        emb = self.time_embed(timesteps[:, None] / 1000)
        h = self.output_blocks[0](torch.cat([h, skip], 1), emb, context)
        return self.out(h)


class Script:
    """ControlNet's: what its forward adds differs at each step, unseen by the arguments."""

    def __init__(self) -> None:
        self.latest_network: Any = None
        self.model_cache: dict[str, Any] = {}
        self.step = 0

    def hook(self, unet: Any, network: nn.Module | None) -> None:
        around = nn.Module()  # each job has a copy of what is kept, around the same network
        around.control_model = network

        def forward(
            unet: Any, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor
        ) -> torch.Tensor:
            self.step += 1
            strength = 0.1 * (self.step % 5) if float(x.abs().amax()) > 0 else 0.0
            added = network(x, timesteps, context) if network is not None else []
            emb, outs = unet.time_embed(timesteps[:, None] / 1000), []
            for module in (*unet.input_blocks, unet.middle_block):
                x = module(x, emb, context)
                outs.append(x)
            for i, residual in enumerate(added):
                outs[i] += strength * residual  # in place: what a part gives is its caller's
            h = torch.cat([(1 + strength) * outs[3], outs[2]], 1)
            result: torch.Tensor = unet.out(unet.output_blocks[0](h, emb, context))
            return result

        unit = SimpleNamespace(control_model=around)
        self.latest_network = SimpleNamespace(model=unet, lowvram=False, control_params=[unit])
        unet.forward = MethodType(forward, unet)

    def restore(self, unet: nn.Module) -> None:
        del unet.forward
        self.latest_network = None


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def host(script: Script) -> Iterator[A1111StandIn]:
    with a1111() as stand_in:
        for cls in (TimestepEmbedSequential, UNetModel):
            live_in(cls, HOME)
        torch.manual_seed(0)
        stand_in.model.model.diffusion_model = UNetModel().eval().requires_grad_(False)
        stand_in.controlnet = script  # type: ignore[assignment]
        sys.modules["modules.scripts"].scripts_txt2img.alwayson_scripts[:] = [script]  # type: ignore[attr-defined]
        yield stand_in


@pytest.fixture
def unet(host: A1111StandIn) -> Any:
    return host.model.model.diffusion_model


@pytest.fixture
def graphs(host: A1111StandIn) -> GraphsForJobs:
    return GraphsForJobs(A1111Host())


@pytest.fixture
def draw(
    host: A1111StandIn,
    unet: Any,
    script: Script,
    graphs: GraphsForJobs,
    recorder: StrictRecorder,
    tmp_path: Path,
) -> Any:
    options = CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1)

    @contextmanager
    def job(controlled: bool, network: nn.Module | None, **more: Any) -> Iterator[None]:
        p = FakeProcessing()
        graphs.begin(p, options, **more)
        assert graphs.session is not None
        if graphs.session.cuda_graphs._recorder is not recorder:
            graphs.session.cuda_graphs = CudaGraphCache(recorder)
        if controlled:
            script.hook(unet, network)
        graphs.before_sampling(p)
        yield
        graphs.end(p)
        if controlled:
            script.restore(unet)

    def drawn(
        controlled: bool = True, network: nn.Module | None = None, steps: int = 8, **size: int
    ) -> None:
        """A job, each of its steps compared with the host's own."""
        with job(controlled, network):
            for _ in range(steps):
                step, found = script.step, host.unet(**size)
                for attached in graphs.models.attached:
                    attached.component._set_active(False)
                script.step = step
                expected = host.unet(**size)
                for attached in graphs.models.attached:
                    attached.component._set_active(True)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    return drawn


def parts_of(graphs: GraphsForJobs, name: str = "unet") -> list[CapturedForward]:
    kept = [*graphs.models.attached, *graphs.models.suspended]
    component: Component = next(a.component for a in kept if a.component.name == name)
    return component._parts


def test_parts_are_recorded_once_for_all_jobs(
    graphs: GraphsForJobs, recorder: StrictRecorder, unet: Any, draw: Any
) -> None:
    before = [dict(vars(module)) for module in unet.modules()]
    draw()
    parts = parts_of(graphs)
    assert [part.reason for part in parts] == [""] * PARTS
    assert all(part.replayed or not part.active for part in parts)
    assert recorder.recorded == PARTS
    for controlled in (False, True, False, True):
        draw(controlled)
    assert parts_of(graphs) is parts
    assert recorder.recorded == PARTS + 1  # and the whole forward without a ControlNet
    assert graphs.session is not None
    assert list(graphs.session.cuda_graphs.dropped) == []
    assert [dict(vars(module)) for module in unet.modules()] == before


def test_a_size_counts_as_one_capture(
    graphs: GraphsForJobs, recorder: StrictRecorder, draw: Any
) -> None:
    draw(steps=1)
    assert graphs.session is not None
    cuda_graphs = graphs.session.cuda_graphs = CudaGraphCache(recorder, limit=2)
    graphs.close()
    draw(steps=1)
    assert graphs.session is not None
    graphs.session.cuda_graphs = cuda_graphs
    for part in parts_of(graphs):
        part._cuda_graphs = cuda_graphs
    for width in (8, 9, 10):
        draw(width=width)
        assert len(cuda_graphs) == PARTS * min(2, width - 7)
    draw(width=10)
    assert cuda_graphs.made == 3 * PARTS


def test_a_part_with_a_hook_of_another_extension_is_left_alone(
    graphs: GraphsForJobs, recorder: StrictRecorder, unet: Any, draw: Any
) -> None:
    """ControlNet's reference mode replaces the forward of attentions."""
    attention = unet.middle_block[0].attn1
    handle = attention.register_forward_hook(lambda *given: 1.25 * given[-1])
    draw()
    handle.remove()
    (left,) = [part for part in parts_of(graphs) if part.reason]
    assert left.model is unet.middle_block
    assert "hook of another extension" in left.reason
    assert recorder.recorded == PARTS - 1
    draw(steps=20)  # a part that was refused is looked at again, though not at each call
    assert recorder.recorded == PARTS


def test_a_network_is_kept_while_the_extension_keeps_it(
    graphs: GraphsForJobs, recorder: StrictRecorder, script: Script, draw: Any
) -> None:
    network = ControlNet().eval().requires_grad_(False)
    around = nn.Module()
    around.control_model = network
    script.model_cache["one"] = SimpleNamespace(model=around)
    draw(network=network)
    recorded = recorder.recorded
    assert recorded == PARTS + NETWORK_PARTS
    draw(network=network)
    assert recorder.recorded == recorded
    assert len(parts_of(graphs, "controlnet")) == NETWORK_PARTS
    kept = weakref.ref(network)
    del network, around
    script.model_cache.clear()
    gc.collect()
    assert kept() is None
    assert not any(a.component.name == "controlnet" for a in graphs.models.suspended)
    draw()
    assert recorder.recorded == recorded


def test_a_network_that_nobody_keeps_is_kept_by_us_neither(
    graphs: GraphsForJobs, draw: Any
) -> None:
    network = ControlNet().eval().requires_grad_(False)
    draw(network=network)
    assert not any(a.component.name == "controlnet" for a in graphs.models.suspended)
    kept = weakref.ref(network)
    del network
    gc.collect()
    assert kept() is None

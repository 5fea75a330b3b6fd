"""Weights that Forge, Neo and reForge stream from main memory at each step, on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.running import streamed_weights
from onediff_ext.engine.running.streamed_weights import NO_ROOM
from onediff_ext.hosts.pinned_memory import PINNED_MEMORY
from onediff_ext.hosts.pinned_moves import PinnedMoves
from onediff_ext.session.session import Session
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_blocks_stand_in import Device
from tests.support.forge_lora_stand_in import HOMES, StreamedLora
from tests.support.forge_stand_in import ADAPTERS, FakeProcessing, ForgeStandIn, running

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
# In each kind of block, and between blocks.
STREAMED = (
    *("first.in_layers.2", "second.emb_layers.1", "transformer.attn2.to_k"),
    *("transformer.ff.out", "transformer.norm2", "entry"),
)
CASTS = {"reforge": "ldm_patched_cast_weights"}


@pytest.fixture(params=sorted(ADAPTERS))
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForgeStandIn]:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the model is compared in fp32
    with running(request.param) as stand_in:
        objects = stand_in.engine.forge_objects
        objects.unet.load_device = GPU
        with torch.inference_mode():
            stand_in.unet.to(GPU)
        yield stand_in


@pytest.fixture
def session(host: ForgeStandIn, graphs: GraphsForJobs, tmp_path: Path) -> Iterator[Session]:
    """Of a job that has begun to sample. The graphs are there after its first step."""
    options = CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1)
    stream(host)
    p = FakeProcessing()
    graphs.begin(p, options)
    graphs.before_sampling(p)
    assert graphs.session is not None
    yield graphs.session
    graphs.end(p)


@torch.inference_mode()
def stream(host: ForgeStandIn) -> None:
    """Leave some layers in main memory, as the host does with a model that does not fit."""
    weights: list[nn.Parameter] = []
    for name in STREAMED:
        layer = host.unet.get_submodule(name)
        setattr(layer, CASTS.get(host.name, "parameters_manual_cast"), True)
        layer.to("cpu")
        weights += list(layer.parameters())
    pin(weights)


def pin(weights: Sequence[torch.Tensor]) -> None:
    with PinnedMoves() as moves:  # the time for pinning counts from here
        pass
    assert moves.pin(weights, GPU) == len(weights)
    assert all(map(PINNED_MEMORY.holds, weights))


def weight_of(host: ForgeStandIn, name: str) -> nn.Parameter:
    return host.unet.get_parameter(f"{name}.weight")


def step(host: ForgeStandIn, seed: int, size: int = 8) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 4, size, size, generator=noise).to(GPU)
    context = torch.randn(2, 77, 24, generator=noise).to(GPU)
    with torch.inference_mode():
        timesteps = torch.full((2,), 300.0 + seed, device=GPU)
        result: torch.Tensor = host.unet(x, timesteps, context=context, transformer_options={})
    torch.cuda.synchronize()  # as `StreamedLayers.wait`, which the stand-in's memory does not call
    return result.clone()


def assert_right(host: ForgeStandIn, graphs: GraphsForJobs, seed: int, size: int = 8) -> None:
    found = step(host, seed, size)
    unet = next(a for a in graphs.models.attached if a.component.name == "unet")
    with unet.component.paused():
        expected = step(host, seed, size)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def settle(host: ForgeStandIn, size: int = 8) -> None:
    for seed in range(7):
        step(host, seed, size)


def captured_reason(graphs: GraphsForJobs) -> str:
    unet = next(a for a in graphs.models.attached if a.component.name == "unet")
    assert unet.component.captured is not None
    return unet.component.captured.reason


def test_streamed_blocks_run_through_graphs_and_are_recorded(
    host: ForgeStandIn, graphs: GraphsForJobs, session: Session
) -> None:
    settle(host)
    assert session.fallbacks() == []
    assert {kind.state.value for kind in session.kinds} == {"ready"}
    assert captured_reason(graphs) == ""
    assert session.cuda_graphs.made == 1
    for seed in range(20, 24):
        assert_right(host, graphs, seed)
    settle(host, size=12)
    for seed in range(30, 34):
        assert_right(host, graphs, seed, size=12)
    assert session.cuda_graphs.made == 2


def test_numbers_written_to_streamed_weights_are_read(
    host: ForgeStandIn, graphs: GraphsForJobs, session: Session
) -> None:
    settle(host)
    before = step(host, 40)
    for name in STREAMED:
        weight = weight_of(host, name)
        with torch.inference_mode():
            weight.mul_(1.25)
        assert not torch.equal(step(host, 40), before), name
        assert_right(host, graphs, 40)
        before = step(host, 40)
    assert session.cuda_graphs.made == 1


def test_a_streamed_layer_that_moves_to_the_gpu_and_back(
    host: ForgeStandIn, graphs: GraphsForJobs, session: Session
) -> None:
    settle(host)
    layer = host.unet.get_submodule("transformer.ff.out")
    for _ in range(2):
        with torch.inference_mode():
            layer.to(GPU)
        assert_right(host, graphs, 50)
        settle(host)
        assert_right(host, graphs, 51)
        with torch.inference_mode():
            layer.to("cpu")
        assert_right(host, graphs, 52)
        stream(host)
        settle(host)
        assert_right(host, graphs, 53)
        assert captured_reason(graphs) == ""
    assert session.fallbacks() == []


def test_ordinary_main_memory_is_not_recorded(
    host: ForgeStandIn, graphs: GraphsForJobs, session: Session
) -> None:
    weight = weight_of(host, "transformer.ff.out")
    with torch.inference_mode():
        weight.data = weight.data.clone()
    assert not PINNED_MEMORY.holds(weight)
    settle(host)
    assert session.fallbacks() == []  # graphs get copies all the same
    assert captured_reason(graphs) == "part of the weights is on another device (offloading)"
    assert session.cuda_graphs.made == 0
    assert_right(host, graphs, 60)


def test_a_weight_of_another_dtype_is_recorded(
    host: ForgeStandIn, graphs: GraphsForJobs, session: Session
) -> None:
    """Each replay copies it as it is, and converts the copy."""
    weight = weight_of(host, "entry")
    with torch.inference_mode():
        weight.data = weight.data.to(torch.float16)
    pin([weight])
    settle(host)
    assert captured_reason(graphs) == ""
    made = session.cuda_graphs.made
    assert made == 1
    with torch.inference_mode():
        weight.mul_(0.5)
    assert_right(host, graphs, 61)
    assert session.cuda_graphs.made == made


def test_a_conversion_in_main_memory_is_not_recorded(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would happen once, and the CUDA graph would read what is no longer there."""

    def cast(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return weight.to(torch.float64).to(device=x.device, dtype=x.dtype, non_blocking=True)

    monkeypatch.setattr(Device, "cast", cast)
    settle(host)
    assert "reads a weight in main memory" in captured_reason(graphs)
    assert session.cuda_graphs.made == 0
    assert_right(host, graphs, 61)


def test_a_stream_of_the_host_is_not_recorded(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with the hosts' option to copy weights on a stream of its own."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def cast(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):
            found = weight.to(device=x.device, dtype=x.dtype, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        return found

    monkeypatch.setattr(Device, "cast", cast)
    settle(host)
    assert "reads a weight in main memory" in captured_reason(graphs)
    assert_right(host, graphs, 62)


@pytest.fixture
def lora(host: ForgeStandIn) -> StreamedLora:
    """Of streamed layers and of one that is on the GPU, in main memory itself."""
    if host.name not in HOMES:
        pytest.skip("merges its LoRAs")
    made = StreamedLora(host.name)
    for name in STREAMED:
        if weight_of(host, name).ndim > 1:
            made.add(host.unet, name)
    made.add(host.unet, "transformer.attn1.to_q")
    return made


def test_loras_of_streamed_layers_are_recorded(
    host: ForgeStandIn, graphs: GraphsForJobs, session: Session, lora: StreamedLora
) -> None:
    settle(host)
    plain = step(host, 80)
    pin(lora.tensors())
    for _ in range(2):
        lora.switch(host.unet, on=True)
        settle(host)
        assert session.fallbacks() == []
        assert captured_reason(graphs) == ""
        assert not torch.allclose(step(host, 80), plain, atol=1e-2)
        for seed in range(80, 84):
            assert_right(host, graphs, seed)
        lora.switch(host.unet, on=False)
        assert_right(host, graphs, 84)
        settle(host)
        torch.testing.assert_close(step(host, 80), plain, rtol=1e-4, atol=1e-5)
    assert session.cuda_graphs.made > 1


def test_other_strengths_and_numbers_of_a_lora_are_read(
    host: ForgeStandIn, graphs: GraphsForJobs, session: Session, lora: StreamedLora
) -> None:
    pin(lora.tensors())
    lora.switch(host.unet, on=True)
    settle(host)
    made = session.cuda_graphs.made
    with torch.inference_mode():
        for tensor in lora.tensors():
            tensor.mul_(0.5)
    assert_right(host, graphs, 85)
    assert session.cuda_graphs.made == made == 1
    for key, patches in lora.patches.items():
        _, *rest = patches[0]
        lora.patches[key] = [(0.7, *rest)]
    assert_right(host, graphs, 86)
    settle(host)
    assert_right(host, graphs, 87)
    assert captured_reason(graphs) == ""


def test_loras_in_ordinary_main_memory_are_not_recorded(
    host: ForgeStandIn, graphs: GraphsForJobs, session: Session, lora: StreamedLora
) -> None:
    lora.switch(host.unet, on=True)
    settle(host)
    assert session.fallbacks() == []
    assert captured_reason(graphs) == "part of the weights is on another device (offloading)"
    assert session.cuda_graphs.made == 0
    assert_right(host, graphs, 88)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_loras_of_another_dtype_are_recorded(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    session: Session,
    lora: StreamedLora,
    dtype: torch.dtype,
) -> None:
    """Each replay copies them as they are, and converts the copies."""
    with torch.inference_mode():
        for tensor in lora.tensors():
            tensor.data = tensor.to(dtype)
    pin(lora.tensors())
    lora.switch(host.unet, on=True)
    settle(host)
    assert session.fallbacks() == []
    assert captured_reason(graphs) == ""
    assert session.cuda_graphs.made == 1
    assert_right(host, graphs, 89)
    with torch.inference_mode():
        for tensor in lora.tensors():
            tensor.mul_(0.5)
    assert_right(host, graphs, 90)
    assert session.cuda_graphs.made == 1


def test_without_room_for_its_weights_a_block_is_eager(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamed_weights, "_FITS_BYTES", 0)
    monkeypatch.setattr(streamed_weights, "_FREE_PART", 2**60)
    settle(host)
    assert {fallback.reason for fallback in session.fallbacks()} == {NO_ROOM}
    assert_right(host, graphs, 63)


def test_where_memory_runs_out_in_the_copies_a_block_is_eager(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settle(host)

    def full(*_: Any) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(streamed_weights, "copy_weights", full)
    host.unet.register_module("another", nn.Identity())  # nothing is replayed from now on
    for seed in range(3):
        assert_right(host, graphs, 70 + seed)
    assert {fallback.reason for fallback in session.fallbacks()} == {NO_ROOM}

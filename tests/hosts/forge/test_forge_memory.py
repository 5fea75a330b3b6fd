"""The memory of CUDA graphs in the memory management of Forge, Neo and reForge."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.hosts.forge_blocks import ForgeBlocks
from onediff_ext.hosts.forge_memory import MemoryFunctions, StreamedLayers
from onediff_ext.hosts.pinned_memory import PinnedMemory
from onediff_ext.hosts.pinned_moves import PinnedMoves
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.fake_gpu import GB
from tests.support.forge_stand_in import ADAPTERS, FakeProcessing, ForgeStandIn

GPU = torch.device("cuda", 0)


def host_memory() -> Any:
    """As much of ``backend.memory_management`` as a full GPU of 8 GB needs."""
    memory: Any = ModuleType("memory_management")
    memory.free, memory.unloaded = 2 * GB, []
    memory.get_torch_device = lambda: GPU

    def get_free_memory(dev: Any = None, torch_free_too: bool = False) -> Any:
        return (memory.free, GB) if torch_free_too else memory.free

    def free_memory(memory_required: float, device: Any, keep_loaded: Any = ()) -> None:
        if memory.get_free_memory(device) < memory_required:
            memory.unloaded.append("UNet")

    memory.get_free_memory, memory.free_memory = get_free_memory, free_memory
    return memory


def memory_functions() -> MemoryFunctions:
    moves = PinnedMoves()
    return MemoryFunctions(moves, StreamedLayers(moves))


def test_cuda_graphs_go_before_the_host_unloads_a_model() -> None:
    memory, patches = host_memory(), Patches()

    def make_room(needed_bytes: int, device: torch.device) -> None:
        assert (needed_bytes, device) == (3 * GB, GPU)
        memory.free = 4 * GB

    memory_functions().share(memory, patches, make_room, lambda: 0)
    memory.free_memory(3 * GB, GPU, keep_loaded=[])
    assert memory.unloaded == []
    patches.undo()
    memory.free = 2 * GB
    memory.free_memory(3 * GB, GPU)
    assert memory.unloaded == ["UNet"]


def test_what_can_be_given_back_counts_as_free() -> None:
    memory = host_memory()
    with Patches() as patches:
        memory_functions().share(memory, patches, lambda *_: None, lambda: GB)
        assert memory.get_free_memory() == 3 * GB
        assert memory.get_free_memory(GPU, torch_free_too=True) == (3 * GB, GB)
        assert memory.get_free_memory(torch.device("cpu")) == 2 * GB
    assert memory.get_free_memory() == 2 * GB


def test_all_memory_may_be_asked_for() -> None:
    asked: list[int] = []
    memory = host_memory()
    with Patches() as patches:
        memory_functions().share(memory, patches, lambda needed, _: asked.append(needed), lambda: 0)
        memory.free_memory(1e30, GPU)  # the host unloads everything
        memory.free_memory(1e30, torch.device("cpu"))
    assert asked == [2**62]


def test_a_replacement_that_another_extension_put_back_is_not_replaced_again() -> None:
    asked: list[int] = []
    memory, functions = host_memory(), memory_functions()
    own = memory.free_memory, memory.get_free_memory
    for _ in range(5):
        patches = Patches()
        functions.share(memory, patches, lambda needed, _: asked.append(needed), lambda: GB)
        functions.speed_up_moves(memory, patches)
        left = memory.free_memory, memory.get_free_memory
        asked.clear()
        memory.free_memory(3 * GB, GPU)
        assert asked == [3 * GB]
        assert memory.get_free_memory() == 3 * GB
        patches.undo()
        memory.free_memory, memory.get_free_memory = left
    patches = Patches()
    functions.share(memory, patches, lambda *_: None, lambda: 0)
    patches.undo()
    assert (memory.free_memory, memory.get_free_memory) == own


def test_while_a_job_runs_the_host_asks_us_first(host: ForgeStandIn, tmp_path: Path) -> None:
    adapter: Any = ADAPTERS[host.name]()
    management = adapter.memory_management()
    for name, value in vars(host_memory()).items():
        if not name.startswith("__"):
            setattr(management, name, value)
    own = management.free_memory, management.get_free_memory
    graphs, p = GraphsForJobs(adapter), FakeProcessing()
    graphs.begin(p, CompileOptions(backend="eager", build="never", store=tmp_path))
    assert management.free_memory is not own[0]
    management.free_memory(GB, torch.device("cpu"))
    graphs.end(p)
    assert (management.free_memory, management.get_free_memory) == own


@contextmanager
def streaming(runner: BlockRunner) -> Iterator[None]:
    """Let the host move one weight of a block in at each call.

    The meta device stands for the one that the weight is streamed from.
    """
    layer = next(m for m in runner.block.modules() if "weight" in m._parameters)
    own = layer._parameters["weight"]
    assert own is not None
    with torch.inference_mode():
        elsewhere = torch.nn.Parameter(own.detach().to("meta"))
    method = type(runner.block).forward

    def fetching(block: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's own forward, which copies the weights at each call."""
        is_streamed = layer._parameters["weight"] is elsewhere
        layer._parameters["weight"] = own
        try:
            return method(block, *args, **kwargs)
        finally:
            layer._parameters["weight"] = elsewhere if is_streamed else own

    layer._parameters["weight"] = elsewhere
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockRunner, "eager", property(lambda self: fetching.__get__(self.block)))
        try:
            yield
        finally:
            layer._parameters["weight"] = own


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[BlockRunner]:
    """The runners that examined their block, once for each call."""
    found: list[BlockRunner] = []
    prepare = BlockRunner._prepare

    def noted(runner: BlockRunner, *arguments: Any) -> Any:
        found.append(runner)
        return prepare(runner, *arguments)

    monkeypatch.setattr(BlockRunner, "_prepare", noted)
    return found


def test_resident_blocks_run_their_graphs_and_streamed_ones_eager(
    host: ForgeStandIn, tmp_path: Path, examined: list[BlockRunner]
) -> None:
    """Streamed blocks are examined once in an image, until their weights are there."""
    graphs, options = (
        GraphsForJobs(ADAPTERS[host.name]()),
        CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1),
    )
    p = FakeProcessing()
    graphs.begin(p, options)
    graphs.before_sampling(p)
    for _ in range(2):
        expected = host.draw()
    graphs.end(p)
    for _ in range(2):  # two images
        p = FakeProcessing()
        graphs.begin(p, options)
        graphs.before_sampling(p)
        (unet,) = [a.component for a in graphs.models.attached if not a.component.role.is_vae]
        streamed, *others = unet.runners
        examined.clear()
        with streaming(streamed):
            for _ in range(3):
                torch.testing.assert_close(host.draw(), expected, rtol=1e-4, atol=1e-5)
            assert "offloading" in str(streamed.eager_reason)
            assert [runner.eager_reason for runner in others] == [None] * len(others)
        assert examined.count(streamed) == 1
        assert {examined.count(runner) for runner in others} == {3}
        torch.testing.assert_close(host.draw(), expected, rtol=1e-4, atol=1e-5)
        assert streamed.eager_reason is None
        graphs.end(p)
    graphs.close()


def test_a_block_whose_weights_change_at_each_call_is_examined_once_in_an_image(
    host: ForgeStandIn, tmp_path: Path, examined: list[BlockRunner]
) -> None:
    """A LoRA of layers that the host moves in: it is merged at each call."""
    graphs, p = GraphsForJobs(ADAPTERS[host.name]()), FakeProcessing()
    graphs.begin(p, CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1))
    graphs.before_sampling(p)
    for _ in range(2):
        plain = host.draw()
    (unet,) = [a.component for a in graphs.models.attached if not a.component.role.is_vae]
    layer = host.unet.transformer.ff.out
    (changed,) = [r for r in unet.runners if layer in r.block.modules()]
    addition = torch.full_like(layer.weight, 0.05)
    examined.clear()
    merge_at_each_call(host, layer, addition)
    merged = [host.draw() for _ in range(3)]
    assert "change at each call" in str(changed.eager_reason)
    assert examined.count(changed) == 1
    assert not torch.allclose(merged[0], plain, atol=1e-3)
    merge_at_each_call(host, layer, None)
    torch.testing.assert_close(host.draw(), plain, rtol=1e-4, atol=1e-5)
    assert changed.eager_reason is None
    graphs.end(p)
    graphs.close()


def merge_at_each_call(host: ForgeStandIn, layer: Any, addition: torch.Tensor | None) -> None:
    """Have the host add something to a layer's weight at each call, or no longer."""
    if host.name == "forge":
        layer.forge_online_loras = {} if addition is None else {"weight": addition}
    else:
        layer.weight_function = [] if addition is None else [lambda weight: weight + addition]


def test_blocks_are_left_to_a_host_that_copies_weights_on_its_own_stream(
    host: ForgeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its swap method "Async": layers are copied while others compute."""
    families = [f for f in ADAPTERS[host.name]().families() if isinstance(f, ForgeBlocks)]
    assert families
    assert all(family.streams_weights() for family in families)
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(PinnedMemory, "holds", lambda _, tensor: tensor is pinned[-1])
    pinned.append(torch.ones(4))
    assert all(family.stays_pinned(pinned[0]) for family in families)
    assert not any(family.stays_pinned(torch.ones(4)) for family in families)
    if host.name == "reforge":
        management = sys.modules["ldm_patched.modules.model_management"]
        monkeypatch.setattr(management, "NUM_STREAMS", 2, raising=False)
    else:
        stream: Any = ModuleType("backend.stream")
        stream.should_use_stream = lambda: True
        monkeypatch.setitem(sys.modules, "backend.stream", stream)
    assert not any(family.streams_weights() for family in families)
    assert not any(family.stays_pinned(pinned[0]) for family in families)

"""Weights in main memory: which blocks get copies. The meta device stands for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D

from onediff_ext.engine.blocks.weight_form import layout_of
from onediff_ext.engine.blocks.weight_functions import (
    FunctionState,
    LayerFunctions,
    WeightFunctionRule,
)
from onediff_ext.engine.memory_budget import GpuMemory, MemoryBudget, MemoryReading
from onediff_ext.engine.running import streamed_weights
from onediff_ext.engine.running.streamed_weights import (
    CHANGING,
    ELSEWHERE,
    NO_ROOM,
    StreamedWeights,
)

GPU = torch.device("meta")
CALL = torch.empty(1, device=GPU)  # the call's first tensor
MB = 2**20


class FreeMemory(GpuMemory):
    """A GPU with so much free memory, which counts how often it is read."""

    def __init__(self, free: int) -> None:
        self.free, self.reads = free, 0

    def read(self, device: torch.device) -> MemoryReading | None:
        assert device == GPU
        self.reads += 1
        return MemoryReading(total=2**33, free=self.free, reserved=0, allocated=0, peak=0)

    def release_cached(self) -> None:
        raise AssertionError("nothing is short")


def streamed(memory: GpuMemory, streams: bool = True) -> StreamedWeights:
    family: Any = SimpleNamespace(streams_weights=lambda: streams)
    return StreamedWeights(family, MemoryBudget(memory))


def tree(*weights: torch.Tensor, wrapped: int | None = None) -> Any:
    holder = {str(i): weight for i, weight in enumerate(weights)}
    slots = [
        SimpleNamespace(
            holder=holder,
            name=name,
            is_wrapped=name == str(wrapped),
            functions=None,
            layout=layout_of(weight),
        )
        for name, weight in holder.items()
    ]
    return SimpleNamespace(
        slots=slots, weights=list(weights), holder=holder, has_weight_functions=False
    )


def on_gpu() -> torch.Tensor:
    return torch.empty(4, device=GPU)


def in_main_memory(size_bytes: int = 16) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def test_weights_in_main_memory_are_copied() -> None:
    found, block = streamed(FreeMemory(0)), tree(on_gpu(), in_main_memory(), in_main_memory())
    assert found.refusal(block, block.weights, CALL, epoch=1) is None
    copies = found.copied(block, block.weights, GPU, unread=(2,), epoch=1)
    assert isinstance(copies, list)
    assert copies[0] is block.weights[0]
    assert [(w.device, w.shape, w.dtype) for w in copies[1:]] == [(GPU, (16,), torch.uint8)] * 2


def test_what_the_graph_does_not_read_is_not_copied() -> None:
    class Uncopied(torch.Tensor):
        def to(self, *_: Any, **__: Any) -> torch.Tensor:
            raise AssertionError("copied")

    weight = in_main_memory().as_subclass(Uncopied)
    copies = streamed(FreeMemory(0)).copied(tree(weight), [weight], GPU, unread=(0,), epoch=1)
    assert isinstance(copies, list)
    assert copies[0].device == GPU


@pytest.mark.parametrize(
    ("block", "streams"),
    [
        (tree(on_gpu(), in_main_memory()), False),
        (tree(in_main_memory(), wrapped=0), True),
        (tree(in_main_memory(), torch.ones(4, 4)[:, :2]), True),
        (tree(in_main_memory(), torch.ones(1).expand(4)), True),
    ],
    ids=[
        "of a family whose layers do not stream",
        "a merged weight",
        "a part",
        "a repeated number",
    ],
)
def test_other_blocks_are_eager(block: Any, streams: bool) -> None:
    found = streamed(FreeMemory(2**40), streams)
    refusal = found.refusal(block, block.weights, CALL, epoch=1)
    assert refusal is not None
    assert refusal.reason == ELSEWHERE


def test_a_weight_on_another_gpu_is_not_copied() -> None:
    """As accelerate leaves them on the meta device; the block's hooks bring them."""
    found, block = streamed(FreeMemory(2**40)), tree(in_main_memory(), on_gpu())
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    refusal = found.refusal(block, block.weights, on_cuda, epoch=1)
    assert refusal is not None
    assert refusal.reason == ELSEWHERE


def test_a_refusal_holds_while_the_weight_is_elsewhere() -> None:
    found, block = streamed(FreeMemory(0), streams=False), tree(in_main_memory())
    refusal = found.refusal(block, block.weights, CALL, epoch=1)
    assert refusal is not None
    assert refusal.still is not None
    assert refusal.still()
    block.holder["0"] = on_gpu()
    assert not refusal.still()


def test_a_large_block_is_copied_if_four_times_as_much_is_free() -> None:
    memory = FreeMemory(4 * 200 * MB)
    found, block = streamed(memory), tree(in_main_memory(150 * MB), in_main_memory(50 * MB))
    for _ in range(3):
        assert found.refusal(block, block.weights, CALL, epoch=1) is None
    assert memory.reads == 1
    memory.free -= 1
    assert found.refusal(block, block.weights, CALL, epoch=1) is None  # of the same image
    refusal = found.refusal(block, block.weights, CALL, epoch=2)
    assert refusal is not None
    assert refusal.reason == NO_ROOM


class Doubles(WeightFunctionRule):
    """Knows one function, which writes to its argument."""

    attributes = {"weight": "functions"}  # noqa: RUF012

    def code(self) -> Sequence[object] | None:
        return None

    def is_known(self, function: object) -> bool:
        return function in (self.double, self.fold)

    def state(self, function: Any) -> FunctionState | None:
        return None

    @staticmethod
    def double(weight: torch.Tensor) -> torch.Tensor:
        return weight.mul_(2)

    @staticmethod
    def fold(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(2, -1)


def with_functions(block: Any, *functions: Any) -> Any:
    """The block with functions on its first weight."""
    layer: Any = torch.nn.Module()
    layer.functions = list(functions)
    block.has_weight_functions = bool(functions)
    block.slots[0].functions = LayerFunctions(layer, "weight", Doubles())
    return block


def test_functions_are_applied_to_copies() -> None:
    cpu, weights = torch.device("cpu"), [torch.ones(4), torch.ones(4)]
    found, block = streamed(FreeMemory(0), streams=False), with_functions(tree(*weights))
    block.has_weight_functions = True
    assert found.are_needed(block, weights, cpu)
    assert found.refusal(block, weights, torch.ones(1), epoch=1) is None
    block.slots[0].functions = with_functions(tree(weights[0]), Doubles.double).slots[0].functions
    assert found.refusal(block, weights, torch.ones(1), epoch=1) is None
    copies = found.copied(block, weights, cpu, unread=(), epoch=1)
    assert isinstance(copies, list)
    assert copies[0].tolist() == [2.0] * 4
    assert copies[1] is weights[1]
    assert weights[0].tolist() == [1.0] * 4
    unread = found.copied(block, weights, cpu, unread=(0,), epoch=1)
    assert isinstance(unread, list)
    assert unread[0].shape == (4,)


def test_functions_are_applied_on_the_gpu_to_what_was_in_main_memory() -> None:
    found, block = streamed(FreeMemory(0)), with_functions(tree(torch.ones(4)), Doubles.double)
    assert found.refusal(block, block.weights, CALL, epoch=1) is None
    copies = found.copied(block, block.weights, GPU, unread=(), epoch=1)
    assert isinstance(copies, list)
    assert copies[0].device == GPU
    assert block.weights[0].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (with_functions(tree(torch.ones(4)), Doubles.double, torch.neg), CHANGING),
        (with_functions(tree(torch.ones(4).half()), Doubles.double), CHANGING),
        (with_functions(tree(torch.ones(4), wrapped=0), Doubles.double), CHANGING),
        (with_functions(tree(torch.ones(1, device=GPU).expand(4)), Doubles.double), CHANGING),
        (with_functions(tree(torch.ones(2**26)), Doubles.double), NO_ROOM),
    ],
    ids=["an unknown one", "before a cast", "on a merged weight", "a repeated number", "no room"],
)
def test_other_functions_keep_the_block_eager(block: Any, reason: str) -> None:
    refusal = streamed(FreeMemory(0)).refusal(block, block.weights, CALL, epoch=1)
    assert refusal is not None
    assert refusal.reason == reason


def test_a_function_that_changes_the_form_keeps_the_block_eager() -> None:
    found, block = streamed(FreeMemory(0)), with_functions(tree(torch.ones(4)), Doubles.fold)
    assert found.refusal(block, block.weights, CALL, epoch=1) is None
    assert found.copied(block, block.weights, GPU, unread=(), epoch=1) == CHANGING
    refusal = found.refusal(block, block.weights, CALL, epoch=1)  # it is not tried at each step
    assert refusal is not None
    assert refusal.reason == CHANGING
    assert found.refusal(block, block.weights, CALL, epoch=2) is None


def test_where_memory_runs_out_for_the_copies_the_layers_do_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They need it for one layer at a time."""

    def full(*_: Any) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(streamed_weights, "copy_weights", full)
    found, block = streamed(FreeMemory(2**40)), tree(in_main_memory())
    assert found.copied(block, block.weights, GPU, unread=(), epoch=1) == NO_ROOM
    refusal = found.refusal(block, block.weights, CALL, epoch=1)
    assert refusal is not None
    assert refusal.reason == NO_ROOM
    assert found.refusal(block, block.weights, CALL, epoch=2) is None
    monkeypatch.setattr(streamed_weights, "is_observed", lambda: True)
    with pytest.raises(torch.OutOfMemoryError):  # the recording is given up
        found.copied(block, block.weights, GPU, unread=(), epoch=2)


def test_memory_of_cuda_graphs_is_not_free() -> None:
    class Graphs:
        def size_on(self, device: torch.device) -> int:
            assert device == GPU
            return 300 * MB

    class WithPool(FreeMemory):
        def read(self, device: torch.device) -> MemoryReading | None:
            return MemoryReading(2**33, self.free, reserved=1000 * MB, allocated=600 * MB, peak=0)

    graphs, budget = Graphs(), MemoryBudget(WithPool(700 * MB))
    family: Any = SimpleNamespace(streams_weights=lambda: True)
    block = tree(in_main_memory(201 * MB))
    assert StreamedWeights(family, budget).refusal(block, block.weights, CALL, epoch=1) is None
    budget.note_pools(graphs.size_on)
    refusal = StreamedWeights(family, budget).refusal(block, block.weights, CALL, epoch=1)
    assert refusal is not None
    assert refusal.reason == NO_ROOM
    del graphs  # nobody keeps them alive
    assert StreamedWeights(family, budget).refusal(block, block.weights, CALL, epoch=1) is None


def test_the_largest_blocks_of_sdxl_fit_without_a_look_at_the_memory() -> None:
    with torch.device("meta"):
        blocks = {
            69: BasicTransformerBlock(1280, 20, 64, cross_attention_dim=2048),
            98: ResnetBlock2D(in_channels=2560, out_channels=1280, temb_channels=1280),
        }
    for megabytes, block in blocks.items():
        size_bytes = sum(weight.numel() for weight in block.parameters()) * torch.half.itemsize
        assert size_bytes // 10**6 == megabytes
        assert size_bytes < streamed_weights._FITS_BYTES

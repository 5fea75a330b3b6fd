"""What CUDA graphs may hold on a small GPU, and when they give it back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from onediff_ext.engine.cuda_graphs.cache import CapturedGraph, CudaGraphCache
from onediff_ext.engine.memory_budget import MARGIN_BYTES, MemoryBudget
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.hosts.diffusers.compile import compile_pipe, one_picture, undo_compile
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.draw import draw_latents
from tests.support.fake_gpu import DEVICE, GB, MB, FakeGpu
from tests.support.frozen_recorder import FrozenRecorder


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu(8 * GB)


@pytest.fixture
def budget(gpu: FakeGpu) -> MemoryBudget:
    return MemoryBudget(gpu)


def test_a_pool_counts_as_taken_although_torch_calls_it_unused(
    gpu: FakeGpu, budget: MemoryBudget
) -> None:
    gpu.tensors, gpu.pools, gpu.cached = 5 * GB, GB, GB // 2
    assert budget.free_bytes(DEVICE, GB) == 2 * GB


def test_cuda_graphs_take_a_quarter_of_an_empty_gpu_and_no_more_than_is_free(
    gpu: FakeGpu, budget: MemoryBudget
) -> None:
    gpu.tensors = 3 * GB
    assert budget.allowed_bytes(DEVICE, 0) == 2 * GB
    gpu.tensors = 7 * GB
    assert budget.allowed_bytes(DEVICE, 0) == GB - MARGIN_BYTES
    gpu.others = GB
    assert budget.allowed_bytes(DEVICE, 0) < 0


def test_a_chosen_limit_holds_only_where_it_fits(gpu: FakeGpu) -> None:
    budget = MemoryBudget(gpu, limit_bytes=3 * GB)
    assert budget.allowed_bytes(DEVICE, 0) == 3 * GB
    gpu.tensors = 6 * GB
    assert budget.allowed_bytes(DEVICE, 0) == 2 * GB - MARGIN_BYTES


def test_they_stay_only_where_no_picture_has_needed_the_memory(
    gpu: FakeGpu, budget: MemoryBudget
) -> None:
    gpu.tensors = 5 * GB
    gpu.use(6 * GB)
    gpu.pools = GB
    assert not budget.must_give_back(DEVICE, GB)
    gpu.pools = 3 * GB
    assert budget.must_give_back(DEVICE, 3 * GB)
    assert not budget.must_give_back(DEVICE, 0), "there is nothing to give"


def test_a_peak_that_a_host_resets_is_remembered(gpu: FakeGpu, budget: MemoryBudget) -> None:
    gpu.use(15 * GB // 2)
    budget.free_bytes(DEVICE, 0)
    gpu.peak, gpu.pools = 0, GB
    assert budget.must_give_back(DEVICE, GB)


def test_after_an_error_of_the_host_nothing_stays(gpu: FakeGpu, budget: MemoryBudget) -> None:
    gpu.pools = GB
    assert not budget.must_give_back(DEVICE, GB)
    budget.note_ran_out(DEVICE)
    assert budget.must_give_back(DEVICE, GB)


def test_tensors_that_cuda_graphs_keep_count_as_theirs(gpu: FakeGpu, budget: MemoryBudget) -> None:
    gpu.tensors, gpu.pools = 3 * GB, GB  # 1 GB of these tensors is kept
    assert budget.allowed_bytes(DEVICE, GB, GB) == 2 * GB
    gpu.others = 3 * GB
    assert budget.allowed_bytes(DEVICE, GB, GB) == 2 * GB  # and 1 GB is free
    gpu.tensors = 4 * GB
    assert budget.allowed_bytes(DEVICE, GB, GB) == 2 * GB - MARGIN_BYTES


@pytest.mark.parametrize("kept_mb", [8, 16])
def test_after_a_picture_kept_tensors_stay_only_in_memory_that_none_has_needed(
    kept_mb: int,
) -> None:
    gpu = FakeGpu(640 * MB)
    cuda_graphs = CudaGraphCache(SizedRecorder(gpu, 2 * MB), 8, MemoryBudget(gpu))
    gpu.use(626 * MB)
    tensor = torch.empty(kept_mb * MB, dtype=torch.uint8)
    gpu.tensors = tensor.nbytes
    inputs = [torch.zeros(1)]

    class Kept:
        def tensors(self) -> list[torch.Tensor]:
            return [tensor]

    def make(recorder: Any) -> CapturedGraph:
        made = recorder.record(lambda: inputs[0] + 1, DEVICE)
        return CapturedGraph(made, inputs, Any, {}, keeps=[Kept()])  # type: ignore[arg-type]

    cuda_graphs.record("one", make, DEVICE)
    assert cuda_graphs.settle() == (kept_mb == 16)
    assert len(cuda_graphs) == (kept_mb == 8)


class SizedRecorder(FrozenRecorder):
    """Its recordings take memory of a fake GPU, and give it back together."""

    def __init__(self, gpu: FakeGpu, size_bytes: int) -> None:
        super().__init__()
        self._gpu, self._size_bytes, self._may_release = gpu, size_bytes, False

    def record(self, *args: Any, **kwargs: Any) -> Any:
        self.release_memory()
        recording = super().record(*args, **kwargs)
        recording.size_bytes = 0 if kwargs.get("lasting") else self._size_bytes
        self._gpu.pools += recording.size_bytes
        return recording

    def forget(self) -> None:
        super().forget()
        self._may_release = True

    def release_memory(self) -> None:
        if self._may_release:
            self._gpu.pools, self._may_release = 0, False


@pytest.fixture
def session(make_session: Callable[..., Session], gpu: FakeGpu) -> Session:
    session = make_session()
    session.budget._gpu = gpu
    session.cuda_graphs = CudaGraphCache(SizedRecorder(gpu, GB), 8, session.budget)
    return session


@pytest.fixture
def pipe(session: Session) -> Iterator[Any]:
    pipe = compile_pipe(models.sd15(0), session=session, ignores=["vae"])
    yield pipe
    undo_compile(pipe)


def settled(pipe: Any, pictures: int = 4) -> torch.Tensor:
    for seed in range(pictures):
        with one_picture(pipe):
            drawn = draw_latents(pipe, seed=seed)
    return drawn


def test_after_a_picture_cuda_graphs_stay_on_a_large_gpu(pipe: Any, session: Session) -> None:
    settled(pipe)
    assert len(session.cuda_graphs) == 1


def test_on_a_full_gpu_they_last_as_long_as_the_denoiser_runs(
    pipe: Any, session: Session, gpu: FakeGpu
) -> None:
    gpu.tensors = 6 * GB
    gpu.use(15 * GB // 2)  # the VAE of an earlier picture
    settled(pipe)
    assert session.cuda_graphs.made
    assert not len(session.cuda_graphs)
    assert gpu.pools == 0
    assert "rest of the picture" in session.cuda_graphs.dropped[-1]


def test_without_free_memory_nothing_is_recorded(pipe: Any, session: Session, gpu: FakeGpu) -> None:
    gpu.tensors = 8 * GB - MARGIN_BYTES // 2
    settled(pipe)
    assert session.cuda_graphs.made == 0


def test_a_host_that_needs_more_than_is_free_gets_it(
    pipe: Any, session: Session, gpu: FakeGpu
) -> None:
    gpu.tensors = 4 * GB
    settled(pipe)
    assert session.cuda_graphs.make_room(2 * GB, DEVICE) == 0
    assert session.cuda_graphs.make_room(7 * GB // 2, DEVICE) == 1
    assert gpu.pools == 0


def test_an_error_that_ends_a_picture_gives_all_memory_back(
    pipe: Any, session: Session, gpu: FakeGpu
) -> None:
    settled(pipe)
    with pytest.raises(torch.OutOfMemoryError), one_picture(pipe):
        raise torch.OutOfMemoryError("the text encoder")
    assert gpu.pools == 0
    settled(pipe, 2)
    assert not len(session.cuda_graphs), "it may run out there again"
    assert is_out_of_memory(torch.OutOfMemoryError("the text encoder"))


def test_what_cuda_graphs_hold_is_told(pipe: Any, session: Session) -> None:
    settled(pipe)
    held = session.cuda_graphs.held_bytes()
    assert held["pools"] >= GB
    assert held["buffers"] > 0


def test_the_limit_of_the_options_is_the_budgets(make_session: Callable[..., Session]) -> None:
    assert make_session(capture_limit_bytes=3).budget.allowed_bytes(DEVICE, 0) == 3


def test_weights_that_a_host_replaces_are_freed_one_by_one(pipe: Any) -> None:
    """Old weights that are kept leave no room for the new ones."""
    settled(pipe)
    layers = [m for m in pipe.unet.modules() if isinstance(m, torch.nn.Linear)]
    old = [weakref.ref(layer.weight) for layer in layers]
    for layer in layers:
        layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5)
    assert [ref for ref in old if ref() is not None] == []

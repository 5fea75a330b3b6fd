"""The recorder of CUDA graphs on several GPUs, with stand-ins for devices and streams."""

from __future__ import annotations

import gc

import pytest
import torch

from onediff_ext.core.errors import CaptureError
from onediff_ext.engine.cuda_graphs.recorder import CudaRecorder
from tests.support.fake_cuda import FakeCuda

DEVICES = [torch.device("cuda:0"), torch.device("cuda:1")]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_each_device_records_its_own_work(cuda: FakeCuda) -> None:
    recorder = CudaRecorder()
    for device in [*DEVICES, *DEVICES]:
        recorder.record(lambda device=device: cuda.launch(device), device)
    assert [graph.launched for graph in cuda.graphs] == [1, 1, 1, 1]
    assert [graph.stream.device for graph in cuda.graphs] == [*DEVICES, *DEVICES]
    # Recordings that share a pool share a stream.
    assert cuda.graphs[0].stream is cuda.graphs[2].stream


def test_a_failed_recording_leaves_each_device_its_stream(cuda: FakeCuda) -> None:
    recorder = CudaRecorder()
    before = [cuda.stream_of(device) for device in DEVICES]
    recorder.record(lambda: None, DEVICES[0])
    with pytest.raises(CaptureError, match="operation failed"):
        recorder.record(cuda.wait, DEVICES[1])
    assert [cuda.stream_of(device) for device in DEVICES] == before
    assert cuda.current == DEVICES[0]


def test_a_device_whose_recordings_are_gone_records_into_a_new_pool(cuda: FakeCuda) -> None:
    """A model that moves to another GPU and back, while that GPU's recordings are alive."""
    recorder = CudaRecorder()
    first, other = (recorder.record(lambda: None, device) for device in DEVICES)
    second = recorder.record(lambda: None, DEVICES[0])
    assert len(cuda.pools) == 2  # both of the first device share one
    del first, second, cuda.graphs[:]
    kept = recorder.record(lambda: None, DEVICES[0])
    assert len(cuda.pools) == 3
    recorder.record(lambda: None, DEVICES[0])
    recorder.record(lambda: None, DEVICES[1])
    assert len(cuda.pools) == 3
    del other, kept


def test_garbage_is_collected_only_where_a_recording_is_held(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection takes half a second in a large process, within a picture."""
    recorder, collected = CudaRecorder(), list[bool]()
    held = [recorder.record(lambda: None, DEVICES[0])]
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    recorder.forget()
    held.clear()
    recorder.release_memory()
    assert not collected
    held.append(recorder.record(lambda: None, DEVICES[0]))
    held.append(held)  # type: ignore[arg-type]
    recorder.forget()
    del held
    recorder.release_memory()
    assert collected == [True]


@pytest.mark.parametrize(("free_bytes", "is_emptied"), [(2**30, True), (4 * 2**30, False)])
def test_unused_memory_is_given_back_only_where_a_recording_may_need_it(
    cuda: FakeCuda, free_bytes: int, is_emptied: bool
) -> None:
    cuda.free_bytes, cuda.kept_bytes = free_bytes, 2**30
    CudaRecorder().record(lambda: cuda.launch(DEVICES[0]), DEVICES[0])
    assert (cuda.kept_bytes == 0) == is_emptied

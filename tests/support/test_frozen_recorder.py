"""The recorder for CPUs fails where a CUDA graph would."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.errors import CaptureError
from onediff_ext.engine.graph_calls import run_graph
from tests.support.frozen_recorder import FrozenRecorder

CPU = torch.device("cpu")


@pytest.fixture
def recorder() -> FrozenRecorder:
    return FrozenRecorder()


@pytest.fixture(autouse=True, params=[torch.no_grad, torch.inference_mode])
def _without_gradients(request: pytest.FixtureRequest) -> Any:
    with request.param():
        yield


def test_a_replay_reads_what_lies_in_the_same_storages(recorder: FrozenRecorder) -> None:
    x, layer = torch.randn(2, 3), nn.Linear(3, 4)
    recording = recorder.record(lambda: layer(x).relu(), CPU)
    for _ in range(2):
        x.copy_(torch.randn(2, 3))
        layer.weight.data.mul_(2)
        recording.replay()
        torch.testing.assert_close(recording.output, layer(x).relu())
    assert recorder.forwards[0].replays == 2


def test_nothing_happens_while_it_records(recorder: FrozenRecorder) -> None:
    x, total = torch.ones(3), torch.zeros(3)
    recording = recorder.record(lambda: total.add_(x), CPU)
    assert total.tolist() == [0, 0, 0]
    recording.replay()
    recording.replay()
    assert total.tolist() == [2, 2, 2]


def test_an_output_has_no_content_before_the_first_replay(recorder: FrozenRecorder) -> None:
    recording = recorder.record(lambda: torch.ones(3) * 2, CPU)
    assert recording.output.isnan().all()
    recording.replay()
    assert recording.output.tolist() == [2, 2, 2]


def test_python_is_frozen(recorder: FrozenRecorder) -> None:
    scale, calls = [2.0], []
    x = torch.ones(3)

    def function() -> torch.Tensor:
        calls.append(1)
        return x * scale[0] + torch.tensor(scale[0])

    recording = recorder.record(function, CPU)
    scale[0] = 5.0
    recording.replay()
    assert recording.output.tolist() == [4, 4, 4]
    assert len(calls) == 1


class Holder:
    def __init__(self) -> None:
        self.weight = torch.ones(3)


def drop(holder: Holder) -> None:
    del holder.weight


def replace(holder: Holder) -> None:
    holder.weight = torch.ones(3)


def set_data(holder: Holder) -> None:
    holder.weight.data = torch.ones(3)


def shrink(holder: Holder) -> None:
    holder.weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("free", [drop, replace, set_data, shrink])
def test_what_others_have_given_back_reads_as_nan(
    recorder: FrozenRecorder, free: Callable[[Holder], None]
) -> None:
    holder, x = Holder(), torch.ones(3)
    recording = recorder.record(lambda: x * holder.weight, CPU)
    recording.replay()
    assert recording.output.tolist() == [1, 1, 1]
    assert recorder.freed == 0
    free(holder)
    recording.replay()
    assert recording.output.isnan().all()
    assert recorder.freed == 1


def test_a_view_keeps_its_storage_alive(recorder: FrozenRecorder) -> None:
    holder = Holder()
    view = holder.weight[1:]
    recording = recorder.record(lambda: holder.weight * 3, CPU)
    del holder.weight
    view.fill_(2)
    recording.replay()
    assert recording.output.tolist() == [3, 6, 6]


def test_casts_that_autocast_has_made_before_are_not_the_recordings(
    recorder: FrozenRecorder,
) -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    if torch.is_inference_mode_enabled():
        pytest.skip("autocast caches nothing in inference mode")

    def run(first: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            if first:
                layer(x)
            recording = recorder.record(lambda: layer(x), CPU)
        recording.replay()
        return recording.output

    assert run(first=True).isnan().any()
    torch.testing.assert_close(run(first=False).float(), layer(x), rtol=0.05, atol=0.05)


def test_a_replay_writes_over_what_was_recorded_later(recorder: FrozenRecorder) -> None:
    x = torch.ones(3)
    first = recorder.record(lambda: x + 1, CPU)
    second = recorder.record(lambda: x + 2, CPU)
    lasting = recorder.record(lambda: x + 3, CPU, lasting=True)
    for recording in (first, second, lasting):
        recording.replay()
    assert first.output.tolist() == [2, 2, 2]
    first.replay()
    assert second.output.isnan().all()
    assert lasting.output.tolist() == [4, 4, 4]
    second.replay()
    assert second.output.tolist() == [3, 3, 3]
    assert first.output.tolist() == [2, 2, 2]


def test_what_a_recording_leaves_behind_is_kept_but_not_what_it_dropped(
    recorder: FrozenRecorder,
) -> None:
    x, left = torch.ones(1000), []

    def function() -> torch.Tensor:
        left.append(x + 1)
        return left[-1] * 2 + (x - 1) * 3

    recording = recorder.record(function, CPU)
    recording.replay()
    assert left[0].tolist() == 1000 * [2]
    assert recording.output.tolist() == 1000 * [4]


def test_what_a_failed_recording_leaves_behind_holds_nothing(recorder: FrozenRecorder) -> None:
    left, written = {}, torch.ones(2)

    def function() -> torch.Tensor:
        written.mul_(3)
        left["new"] = written / 2
        raise RuntimeError("no recording")

    with pytest.raises(CaptureError, match="no recording"):
        recorder.record(function, CPU)
    assert written.tolist() == [1, 1]
    assert left["new"].isnan().all()


def test_a_recording_that_is_dropped_frees_its_memory(recorder: FrozenRecorder) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    x = torch.ones(3)
    recording = recorder.record(lambda: x + 1, CPU)
    weak = StorageWeakRef(recording.output.untyped_storage())
    del recording
    gc.collect()
    assert weak.expired()


def test_it_keeps_nothing_alive_that_others_allocated(recorder: FrozenRecorder) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    holder = Holder()
    weak = StorageWeakRef(holder.weight.untyped_storage())
    recording = recorder.record(lambda: holder.weight.view(3, 1).transpose(0, 1) + 1, CPU)
    recording.replay()
    del holder.weight
    gc.collect()
    assert weak.expired()


def test_views_lists_and_results_written_in_place(recorder: FrozenRecorder) -> None:
    x, out = torch.randn(4, 6), torch.empty(6, 4)

    def function() -> Any:
        parts = x.chunk(2, dim=1)
        joined = torch.cat([parts[1], parts[0]], dim=1)
        joined[0].zero_()
        values, places = joined.max(dim=0)
        out.copy_(joined.t())
        return {"joined": joined.t(), "values": values, "places": places, "out": out}

    recording = recorder.record(function, CPU)
    x.copy_(torch.randn(4, 6))
    recording.replay()
    found = {name: value.clone() for name, value in recording.output.items()}
    expected = function()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.randn(3),
        lambda: torch.nn.functional.dropout(torch.ones(3), 0.5, True),
        lambda: torch.ones(3).sum().item(),
        lambda: torch.ones(3).nonzero(),
    ],
)
def test_what_a_cuda_graph_cannot_hold_is_refused(
    recorder: FrozenRecorder, function: Callable[[], Any]
) -> None:
    with pytest.raises(CaptureError):
        recorder.record(function, CPU)
    assert recorder.recorded == 0


def test_dropout_that_is_off_draws_nothing(recorder: FrozenRecorder) -> None:
    for layer in (nn.Dropout(0.0), nn.Dropout(0.5).eval()):
        recording = recorder.record(lambda layer=layer: layer(torch.ones(3)) + 1, CPU)
        recording.replay()
        assert recording.output.tolist() == [2, 2, 2]


def test_attention_without_dropout_draws_nothing(recorder: FrozenRecorder) -> None:
    x = torch.randn(1, 2, 4, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    recording = recorder.record(lambda: attention(x, x, x), CPU)
    recording.replay()
    torch.testing.assert_close(recording.output, attention(x, x, x))
    with pytest.raises(CaptureError):
        recorder.record(lambda: attention(x, x, x, dropout_p=0.5), CPU)


def test_memory_that_runs_out_is_told_apart(recorder: FrozenRecorder) -> None:
    def function() -> None:
        raise torch.OutOfMemoryError("none")

    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(function, CPU)


def test_nothing_is_replayed_once_all_memory_was_given_back(recorder: FrozenRecorder) -> None:
    recording = recorder.record(lambda: torch.ones(3) + 1, CPU)
    recorder.forget()
    with pytest.raises(AssertionError, match="given back"):
        recording.replay()


def test_a_graph_whose_operators_nobody_sees_is_one_operator(recorder: FrozenRecorder) -> None:
    """A kernel that torch does not see, like AOTInductor's: NumPy does the work."""
    calls = []

    def multiply(arguments: Any) -> tuple[torch.Tensor]:
        calls.append(1)
        a, b = (tensor.detach().numpy() for tensor in arguments)
        return (torch.from_numpy(a * b),)

    x, holder = torch.ones(3), Holder()
    recording = recorder.record(lambda: run_graph(multiply, [x, holder.weight])[0] + 1, CPU)
    x.fill_(4)
    recording.replay()
    assert recording.output.tolist() == [5, 5, 5]
    assert len(calls) == 2
    del holder.weight
    recording.replay()
    assert recording.output.isnan().all()


def test_a_table_is_read_by_numbers_and_not_by_a_mask() -> None:
    """A GPU has to count a mask before it can allocate the result."""
    table, rows, mask = torch.arange(4.0), torch.tensor([2, 0]), torch.tensor([True, False] * 2)
    recorder = FrozenRecorder()  # its recordings do not keep it alive
    recording = recorder.record(lambda: table[rows], torch.device("cpu"))
    rows.copy_(torch.tensor([3, 1]))
    recording.replay()
    assert recording.output.tolist() == [3.0, 1.0]
    with pytest.raises(CaptureError, match="not permitted"):
        recorder.record(lambda: table[mask], torch.device("cpu"))

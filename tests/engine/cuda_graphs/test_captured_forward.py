"""Captured forwards: what is replayed, what makes a CUDA graph stale, and running out of memory.

CUDA graphs need a GPU; here a recorder for CPUs records what they record.
`test_captured_forward_gpu.py` has the real ones.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from onediff_ext.core.errors import CaptureError
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.engine.cuda_graphs import replay_checks
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.model_tracker import ModelTracker
from onediff_ext.hosts.diffusers import warmup
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.session.session import Session
from tests.support.cuda_graph_steps import assert_right, captured, eager, inputs, settle, step
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.ldm_stand_in import live_in
from tests.support.models import sd15, sdxl


def test_a_size_is_recorded_once_and_then_replayed(pipe: Any, recorder: FrozenRecorder) -> None:
    settle(pipe)
    calls = [r.used.calls for r in compiled_state(pipe).components[0].runners]
    assert recorder.recorded == 1
    for seed in range(10, 14):
        assert_right(pipe, seed)
    assert recorder.recorded == 1
    assert captured(pipe).reason == ""
    assert len(calls) > 10


def test_the_second_comparison_is_made_for_the_first_size_only(
    pipe: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[object] = []
    monkeypatch.setattr(
        replay_checks, "compare", lambda *tensors: compared.append(tensors) or compare(*tensors)
    )
    settle(pipe)
    assert len(compared) == 2
    settle(pipe, height=8, width=8)
    assert len(compared) == 3
    assert_right(pipe, height=8, width=8)
    change_storage(pipe.unet)  # the same model elsewhere, as offloading leaves it
    settle(pipe)
    assert len(compared) == 4
    change_parameter(pipe.unet)  # another model, as far as a capture can tell
    settle(pipe)
    assert len(compared) == 6


def test_once_a_size_has_passed_others_are_recorded_with_their_first_call(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    assert recorder.recorded == 1
    step(pipe, height=8, width=8)
    assert recorder.recorded == 2
    assert_right(pipe, height=8, width=8)
    change_parameter(pipe.unet)
    step(pipe, height=16, width=8)
    assert recorder.recorded == 2  # another model has to pass first


def test_nothing_is_recorded_where_a_block_gave_eagers_result(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    kind = compiled_state(pipe).components[0].runners[3].used
    kind.state = KindState.UNCHECKED  # compared within the forward, and ready at its end
    step(pipe, height=8, width=8)
    assert kind.state is KindState.READY
    assert recorder.recorded == 1
    assert captured(pipe).reason == "new graphs are being compared with eager"
    step(pipe, height=8, width=8)
    assert recorder.recorded == 2


def test_a_lora_on_layers_without_a_graph_follows_its_strength(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    """kohya's LoRAs have SD1.5's projections, which no block graph contains."""
    layers = ["proj_in", "proj_out", "conv_in", "time_embedding.linear_1", "to_k"]
    pipe.unet.add_adapter(
        LoraConfig(r=4, lora_alpha=4, target_modules=layers, init_lora_weights=False), "style"
    )
    settle(pipe)
    for weight in (0.3, -1.0, 0.0, 0.3):
        pipe.unet.set_adapters(["style"], [weight])
        for seed in (7, 8):
            assert_right(pipe, seed)
    assert captured(pipe).reason == ""
    pipe.unet.disable_adapters()
    assert_right(pipe, 9)
    recorded = recorder.recorded
    assert_right(pipe, 10)
    assert recorder.recorded == recorded


def test_graphs_that_come_one_after_another_do_not_stop_the_recording(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    kind = compiled_state(pipe).components[0].runners[3].used
    for seed, graph in enumerate(12 * [kind.graph]):
        kind.graph = lambda arguments, graph=graph: graph(arguments)
        assert_right(pipe, seed)
    settle(pipe)
    assert recorder.recorded == 13


def test_a_result_outlives_the_next_replay(pipe: Any) -> None:
    settle(pipe)
    first = step(pipe, 20)
    kept = first.clone()
    step(pipe, 21)
    assert torch.equal(first, kept)


def test_the_number_alive_is_bounded_and_the_least_used_goes_first(
    pipe: Any, session: Session, recorder: FrozenRecorder
) -> None:
    sizes = [(16, 24), (24, 16), (17, 15), (9, 31)]
    for height, width in sizes:
        settle(pipe, height=height, width=width)
    assert len(session.cuda_graphs) == 3
    assert recorder.recorded == 4
    settle(pipe, height=9, width=31)
    assert recorder.recorded == 4
    step(pipe, height=16, width=24)  # the first of all: gone, so recorded again
    assert recorder.recorded == 5


@torch.no_grad()
def test_weights_written_in_place_are_seen_without_a_new_recording(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    before = step(pipe, 30)
    pipe.unet.conv_in.weight.mul_(1.5)
    assert not torch.equal(step(pipe, 30), before)
    assert_right(pipe, 30)
    assert recorder.recorded == 1


def change_parameter(unet: Any) -> None:
    unet.conv_out.weight = nn.Parameter(2 * unet.conv_out.weight, requires_grad=False)


def change_storage(unet: Any) -> None:
    unet.conv_out.weight.data = 2 * unet.conv_out.weight.data


def change_block_weight(unet: Any) -> None:
    weight = unet.mid_block.resnets[0].conv1.weight
    weight.data = -weight.data


def change_attribute(unet: Any) -> None:
    for block in unet.up_blocks:  # what FreeU does
        block.s1, block.s2, block.b1, block.b2 = 0.9, 0.2, 1.2, 1.4


def change_module(unet: Any) -> None:
    unet.conv_out = nn.Conv2d(*unet.conv_out.weight.shape[1::-1], 3, padding=1)
    unet.conv_out.requires_grad_(False)


@pytest.mark.parametrize("gone", [change_storage, change_block_weight])
@torch.no_grad()
def test_nothing_is_replayed_over_weights_that_are_gone(
    pipe: Any, recorder: FrozenRecorder, gone: Callable[[Any], None]
) -> None:
    settle(pipe)
    (recording,) = recorder.forwards
    replays = recording.replays
    step(pipe)
    assert recording.replays == replays + 1
    gone(pipe.unet)
    step(pipe)
    assert recording.replays == replays + 1


@pytest.mark.parametrize(
    "change",
    [change_parameter, change_storage, change_block_weight, change_attribute, change_module],
)
@torch.no_grad()
def test_what_a_capture_froze_makes_it_invalid_when_it_changes(
    pipe: Any, recorder: FrozenRecorder, change: Callable[[Any], None]
) -> None:
    settle(pipe)
    before = step(pipe, 40)
    change(pipe.unet)
    after = step(pipe, 40)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, eager(pipe, 40), rtol=1e-4, atol=1e-5)
    settle(pipe)
    assert recorder.recorded == 2
    assert_right(pipe, 41)


def test_a_foreign_hook_keeps_the_model_from_being_captured(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    handle = pipe.unet.conv_in.register_forward_hook(lambda module, args, output: 2 * output)
    for seed in range(4):
        assert_right(pipe, seed)
    assert recorder.recorded == 1
    assert "hook" in captured(pipe).reason
    handle.remove()
    for seed in range(24):
        step(pipe, seed)
    assert recorder.recorded == 2
    assert_right(pipe)


def test_a_forward_that_changes_from_call_to_call_is_found_out(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return x * type(self).calls

    live_in(Counting, "diffusers.made_for_a_test")
    pipe.unet.conv_norm_out = Counting()
    for seed in range(5):
        Counting.calls = 0
        found = step(pipe, seed)
        Counting.calls = 0
        torch.testing.assert_close(found, eager(pipe, seed), rtol=1e-4, atol=1e-5)
    assert "a replay differs" in captured(pipe).reason


def test_somebody_who_changes_the_model_at_every_call_stops_the_recording(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    for seed in range(30):
        vars(pipe.unet)["marker"] = object()
        step(pipe, seed)
    assert recorder.recorded < 8
    assert captured(pipe).reason == "something changes the model at every call"


def test_a_graph_that_comes_in_while_a_size_is_recorded_does_not_refuse_the_size(
    pipe: Any, recorder: FrozenRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(pipe)
    kind = compiled_state(pipe).components[0].runners[0].used
    record = FrozenRecorder.record

    def graph_first(recorder: FrozenRecorder, *args: Any, **kwargs: Any) -> Any:
        kind.accept(kind.graph, "loaded")  # as another thread does
        monkeypatch.undo()
        return record(recorder, *args, **kwargs)

    monkeypatch.setattr(FrozenRecorder, "record", graph_first)
    step(pipe, height=8, width=8)
    assert recorder.recorded == 1
    assert "A graph came in" in captured(pipe).reason
    settle(pipe, height=8, width=8)
    assert recorder.recorded == 2
    assert_right(pipe, height=8, width=8)


def test_graphs_that_come_in_change_nothing_else_of_a_model(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a whole model takes half a second in a large one, within a picture."""
    settle(pipe)
    read: list[object] = []
    make = ModelTracker._new_snapshot
    monkeypatch.setattr(
        ModelTracker, "_new_snapshot", lambda *given: read.append(given) or make(*given)
    )
    for runner in compiled_state(pipe).components[0].runners:
        runner.used.accept(runner.used.graph, "loaded")
    settle(pipe)
    assert_right(pipe)
    assert not read
    change_parameter(pipe.unet)
    settle(pipe)
    assert read


def test_what_cannot_be_recorded_runs_as_it_is(pipe: Any, recorder: FrozenRecorder) -> None:
    recorder.error = CaptureError("operation not permitted when stream is capturing")
    for seed in range(5):
        assert_right(pipe, seed)
    assert "not permitted" in captured(pipe).reason


def test_without_memory_for_a_recording_the_size_runs_without_one(
    pipe: Any, session: Session, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    recorder.error = torch.OutOfMemoryError("none")
    for seed in range(4):
        assert_right(pipe, seed, height=20, width=20)
    assert captured(pipe).reason == "no memory for a CUDA graph of this size"
    assert len(session.cuda_graphs) == 0
    recorder.error = None
    settle(pipe)


@pytest.mark.parametrize(
    "name", ["has_graphs_of", "is_still", "derived_places", "has_current_derived_weights"]
)
def test_an_error_while_a_replay_is_checked_does_not_cost_the_picture(
    pipe: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(pipe)
    monkeypatch.setattr(ModelTracker, name, lambda *_: 1 / 0)
    for seed in range(3):
        assert_right(pipe, seed)
    assert captured(pipe).reason == "it cannot be looked at: ZeroDivisionError: division by zero"


@pytest.mark.parametrize("name", ["note_derived", "refusal_reason", "frozen"])
def test_an_error_before_a_recording_does_not_cost_the_picture(
    pipe: Any, recorder: FrozenRecorder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelTracker, name, lambda *_: 1 / 0)
    for seed in range(5):
        assert_right(pipe, seed)
    assert recorder.recorded == 0
    assert captured(pipe).reason == "it cannot be looked at: ZeroDivisionError: division by zero"


@pytest.mark.parametrize("first", [1, 2])
def test_a_comparison_without_memory_does_not_cost_the_picture(
    pipe: Any, session: Session, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right behind the recording, or at the call after it."""
    made = iter(range(1, 100))

    def compare_in_little(*tensors: torch.Tensor) -> Any:
        if next(made) == first:
            raise torch.OutOfMemoryError("none")
        return compare(*tensors)

    settle(pipe)
    captured(pipe)._checks.forget()  # so that the next size is compared twice
    monkeypatch.setattr(replay_checks, "compare", compare_in_little)
    for seed in range(4):
        assert_right(pipe, seed, height=20, width=20)
    assert captured(pipe).reason == "no memory for a CUDA graph of this size"
    assert len(session.cuda_graphs) == 0
    settle(pipe, height=12, width=20)


class Hungry(nn.Module):
    """Runs out of memory for more than so many images at once, or the first times."""

    def __init__(self, most: int, failures: int = 0) -> None:
        super().__init__()
        self.most, self.failures = most, failures

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.failures or x.shape[0] > self.most:
            self.failures = max(0, self.failures - 1)
            raise torch.OutOfMemoryError("no room")
        return x


live_in(Hungry, "diffusers.made_for_a_test")


def test_short_of_memory_captures_go_before_an_error_is_seen(pipe: Any, session: Session) -> None:
    settle(pipe)
    expected = eager(pipe, 7, height=12, width=12)
    pipe.unet.conv_act = nn.Sequential(pipe.unet.conv_act, Hungry(most=8, failures=1))
    found = step(pipe, 7, height=12, width=12)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(session.cuda_graphs) == 0


def test_still_short_of_memory_the_batch_is_halved(pipe: Any) -> None:
    expected = eager(pipe, 7)
    inner = Hungry(most=1)
    pipe.unet.conv_act = nn.Sequential(pipe.unet.conv_act, inner)
    torch.testing.assert_close(step(pipe, 7), expected, rtol=1e-4, atol=1e-5)
    inner.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        step(pipe, 7)


@torch.no_grad()
def test_sdxl_with_its_added_conditions(session: Session, recorder: FrozenRecorder) -> None:
    pipe = sdxl(seed=4)
    compile_pipe(pipe, session=session, ignores=["vae"])
    settle(pipe)
    assert_right(pipe, 5)
    one = inputs(pipe.unet, seed=6)
    one["added_cond_kwargs"]["time_ids"] += 100.0
    found = pipe.unet(**one).sample
    with compiled_state(pipe).components[0].paused():
        expected = pipe.unet(**one).sample
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert recorder.recorded == 1


@torch.no_grad()
def test_residuals_of_a_controlnet_are_part_of_the_shape(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    unet = pipe.unet
    seen: list[torch.Tensor] = []
    handles = [
        block.register_forward_hook(lambda module, args, output: seen.extend(output[1]))
        for block in unet.down_blocks
    ]
    middle: list[torch.Tensor] = []
    handles.append(
        unet.mid_block.register_forward_hook(lambda module, args, output: middle.append(output))
    )
    eager(pipe)
    for handle in handles:
        handle.remove()
    first = unet.conv_in(inputs(unet)["sample"])
    down = [0.1 * torch.ones_like(t) for t in (first, *seen)]
    extra = {
        "down_block_additional_residuals": down,
        "mid_block_additional_residual": 0.1 * torch.ones_like(middle[0]),
    }
    for seed in range(24):
        found = unet(**inputs(unet, seed=seed), **extra).sample
        with compiled_state(pipe).components[0].paused():
            expected = unet(**inputs(unet, seed=seed), **extra).sample
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert recorder.recorded == 2  # one without and one with residuals
    assert_right(pipe)


def test_undoing_gives_the_memory_back(
    pipe: Any, session: Session, recorder: FrozenRecorder
) -> None:
    settle(pipe)
    undo_compile(pipe)
    assert len(session.cuda_graphs) == 0
    assert recorder.forgotten


def test_before_there_are_graphs_a_size_is_recorded_within_its_first_picture(
    make_session: Callable[..., Session], recorder: FrozenRecorder, tmp_path: Path
) -> None:
    session = make_session(build="never", store=tmp_path)
    session.cuda_graphs = CudaGraphCache(recorder, limit=3)
    pipe = sd15(seed=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    with session.picture():
        step(pipe, 0)
        assert captured(pipe).reason == "this size is new"
        for seed in range(1, 4):
            assert_right(pipe, seed)
        assert recorder.recorded == 1
    undo_compile(pipe)


def test_a_warm_up_ends_each_size_with_its_first_replay(
    pipe: Any, session: Session, recorder: FrozenRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And compares a recording on other inputs than those that it was made with."""
    stages: Counter[tuple[str, BatchShape]] = Counter()
    given: list[torch.Tensor] = []
    make_inputs = warmup.denoiser_inputs

    def make_and_note(*args: Any, **size: int) -> dict[str, Any]:
        made = make_inputs(*args, **size)
        tensors = made["timestep"], made["encoder_hidden_states"], made["sample"]
        given.append(torch.cat([tensor.flatten()[:9].float() for tensor in tensors]))
        return made

    monkeypatch.setattr(warmup, "denoiser_inputs", make_and_note)
    shapes = [BatchShape(128, 128), BatchShape(192, 64), BatchShape(64, 192)]
    warm_up = warmup.pipe_warm_up(pipe, shapes)
    step = warm_up._forward

    def counted(shape: BatchShape, noise: torch.Generator) -> None:
        stages[session.stage, shape] += 1
        step(shape, noise)

    warm_up._forward = counted
    report = warm_up.run()
    assert [figures.shape for figures in report.sizes] == shapes
    assert recorder.recorded == 3
    first, *others = (stages["captures", shape] for shape in shapes)
    assert 2 <= first <= 4  # the first one is compared twice; new graphs before that
    assert others == [2, 2]
    for i, tensors in enumerate(given):
        assert all((tensors != other).sum() > 15 for other in given[:i])
    assert len({float(tensors[0]) for tensors in given}) > 5  # time steps


AUDITED = """
import sys
import torch
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.cuda_graphs.trusted_modules import TrustedModules

model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
snapshot, count = Snapshot(model, TrustedModules()), 0


def listen(event, arguments):
    global count
    count += 1


assert snapshot.holds("picture")
sys.addaudithook(listen)
assert snapshot.holds("picture")
print(count)
assert snapshot.holds("next picture")
assert count > 0  # code that is replaced in place is looked for once in each picture
model[3].weight = torch.nn.Parameter(torch.ones(2, 2))
assert not snapshot.holds()
"""


def test_a_look_at_a_model_calls_nobody_who_listens_to_audit_events() -> None:
    found = subprocess.run(
        [sys.executable, "-c", AUDITED], capture_output=True, text=True, timeout=240, check=False
    )
    assert (found.returncode, found.stdout) == (0, "0\n"), found.stderr


def test_memory_of_dropped_graphs_needs_no_garbage_collection(
    pipe: Any, session: Session, recorder: FrozenRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection takes half a second in a large process, and hosts for small GPUs drop graphs in
    each picture."""
    made = weakref.WeakSet[Any]()
    record = recorder.record

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.add(recording := record(*args, **kwargs))
        return recording

    monkeypatch.setattr(recorder, "record", noted)
    settle(pipe)
    for seed in range(10, 14):
        assert_right(pipe, seed)
    gc.collect()
    assert len(made) >= 1
    gc.disable()
    try:
        session.cuda_graphs.drop_all("the host needs their memory")
        assert len(made) == 0
    finally:
        gc.enable()

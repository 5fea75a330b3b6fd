"""What a replayed call costs beside its replay: the looks at the model, and when they happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.validity.module_attributes import ModuleAttributes
from onediff_ext.engine.validity.python_code import PythonCode
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.session.session import Session
from tests.support.adapter_weights import lora_tensors
from tests.support.cuda_graph_steps import captured, inputs, settle
from tests.support.frozen_recorder import FrozenRecorder, FrozenRecording
from tests.support.instruction_count import InstructionCount
from tests.support.models import sdxl

# Instructions of Python, which are the same on every machine. Before the launch each weight is
# read, and its address. `benchmarks.looks` has the time on a GPU.
BEFORE_THE_LAUNCH, FOR_A_WEIGHT = 5_000, 12
IN_ALL, FOR_A_MODULE = 10_000, 70
FOR_A_LORA_LAYER = 200  # and the ten modules that peft has in each
SIZE = {"height": 8, "width": 8}


def many_modules() -> Any:
    """As many modules as SDXL has, narrow ones."""
    return sdxl(
        3, widths=(32, 64, 64), attention=(False, True, True), depths=(1, 2, 10), heads=(1, 2, 2)
    )


def replayed(pipe: Any, make_session: Callable[..., Session]) -> Any:
    """Compile a pipe, build its graphs, and draw until its UNet is replayed."""
    session = make_session("eager", build="wait")
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    settle(pipe, **SIZE)
    return pipe


def lora_layers(pipe: Any) -> int:
    return sum(hasattr(module, "lora_A") for module in pipe.unet.modules())


@pytest.fixture
def pipe(make_session: Callable[..., Session]) -> Any:
    pipe = replayed(many_modules(), make_session)
    yield pipe
    undo_compile(pipe)


@torch.no_grad()
def test_looking_takes_few_instructions(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_launch, in_all = instructions(pipe, monkeypatch)
    weights = [*pipe.unet.parameters(), *pipe.unet.buffers()]
    assert 2 * len(weights) < before_the_launch < BEFORE_THE_LAUNCH + FOR_A_WEIGHT * len(weights)
    assert in_all < IN_ALL + FOR_A_MODULE * len(list(pipe.unet.modules()))


@torch.no_grad()
def test_a_lora_takes_few_instructions_more(
    make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a merged LoRA are looked at at each step. See `plain-sdxl-h200.json`."""
    pipe = many_modules()
    modules = len(list(pipe.unet.modules()))
    pipe.load_lora_weights(lora_tensors(pipe, text=False))
    _, in_all = instructions(replayed(pipe, make_session), monkeypatch)
    assert lora_layers(pipe) > 300
    assert in_all < IN_ALL + FOR_A_MODULE * modules + FOR_A_LORA_LAYER * lora_layers(pipe)
    undo_compile(pipe)


def instructions(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the instructions of a replayed step: until the launch, and in all."""
    at_launch: list[int] = []
    count = InstructionCount()
    monkeypatch.setattr(FrozenRecording, "replay", lambda _: at_launch.append(count.instructions))
    arguments = inputs(pipe.unet, **SIZE)
    with compiled_state(pipe).session.picture():
        pipe.unet(**arguments)  # the first of a picture compares weights by content
        with count:
            pipe.unet(**arguments)
    assert captured(pipe).replayed
    return at_launch[-1], count.instructions


@torch.no_grad()
def test_before_the_launch_nothing_but_addresses_is_looked_at(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for cls, name in (
        (Snapshot, "weights_lie_where_they_did"),
        (FrozenRecording, "replay"),
        (Snapshot, "holds"),
        (ModuleAttributes, "hold"),
        (PythonCode, "current_generation"),
    ):
        monkeypatch.setattr(cls, name, _noted(getattr(cls, name), name, seen))
    pipe.unet(**inputs(pipe.unet, **SIZE))
    assert captured(pipe).replayed
    assert seen[:2] == ["weights_lie_where_they_did", "replay"]
    assert {"holds", "hold", "current_generation"} <= set(seen[2:])


@torch.no_grad()
def test_a_model_that_cannot_be_recorded_is_looked_at_once_in_a_picture(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Snapshot, "holds", _noted(Snapshot.holds, "holds", seen))
    session, layer = compiled_state(pipe).session, pipe.unet.conv_out
    hook = layer.register_forward_hook(lambda *_: None)
    steps = [inputs(pipe.unet, seed=seed, **SIZE) for seed in range(6)]
    pipe.unet(**steps[0])  # finds the hook
    for _ in range(2):
        seen.clear()
        with session.picture():
            for step in steps:
                pipe.unet(**step)
        assert "has a hook of another extension" in captured(pipe).reason
        assert seen == ["holds"]
    hook.remove()
    with session.picture():
        for step in steps:
            pipe.unet(**step)
    assert captured(pipe).replayed


@torch.no_grad()
def test_no_operator_runs_for_a_look(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are filled in and the output is copied. An operator that reads a number waits for the
    GPU."""
    monkeypatch.setattr(FrozenRecording, "replay", lambda _: None)
    arguments = inputs(pipe.unet, **SIZE)
    with compiled_state(pipe).session.picture():
        pipe.unet(**arguments)  # the first of a picture compares weights by content
        with torch.profiler.profile() as profile:
            pipe.unet(**arguments)
    assert captured(pipe).replayed
    assert {event.name for event in profile.events() if event.name.startswith("aten::")} <= {
        *("aten::copy_", "aten::clone", "aten::empty_like", "aten::empty_strided", "aten::empty"),
    }


def _noted(method: Callable[..., Any], name: str, seen: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return method(*args, **kwargs)

    return noted

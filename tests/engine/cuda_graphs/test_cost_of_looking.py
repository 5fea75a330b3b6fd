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
from tests.support.cuda_graph_steps import captured, inputs, settle
from tests.support.frozen_recorder import FrozenRecorder, FrozenRecording
from tests.support.instruction_count import InstructionCount
from tests.support.models import sdxl

# Instructions of Python, which are the same on every machine. Before the launch each weight is
# read, and its address. `benchmarks.looks` has the time on a GPU.
BEFORE_THE_LAUNCH, FOR_A_WEIGHT = 5_000, 10
IN_ALL, FOR_A_MODULE = 10_000, 75
SIZE = {"height": 8, "width": 8}


@pytest.fixture
def pipe(make_session: Callable[..., Session]) -> Any:
    """As many modules as SDXL has, narrow ones, replayed without any graph."""
    pipe = sdxl(
        3, widths=(32, 64, 64), attention=(False, True, True), depths=(1, 2, 10), heads=(1, 2, 2)
    )
    session = make_session(build="never")
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    settle(pipe, **SIZE)
    yield pipe
    undo_compile(pipe)


@torch.no_grad()
def test_looking_takes_few_instructions(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at_launch: list[int] = []
    count = InstructionCount()
    monkeypatch.setattr(FrozenRecording, "replay", lambda _: at_launch.append(count.instructions))
    arguments = inputs(pipe.unet, **SIZE)
    with compiled_state(pipe).session.picture():
        pipe.unet(**arguments)  # the first of a picture compares weights by content
        with count:
            pipe.unet(**arguments)
    assert captured(pipe).replayed
    weights = [*pipe.unet.parameters(), *pipe.unet.buffers()]
    modules = list(pipe.unet.modules())
    assert 2 * len(weights) < at_launch[-1] < BEFORE_THE_LAUNCH + FOR_A_WEIGHT * len(weights)
    assert count.instructions < IN_ALL + FOR_A_MODULE * len(modules)


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

"""`enable_model_cpu_offload`: whole models move, and run through graphs while they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.session.session import Session
from tests.support.draw import draw_latents
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import sd15


@pytest.fixture
def recorder() -> FrozenRecorder:
    return FrozenRecorder()


@pytest.fixture
def session(
    make_session: Callable[..., Session],
    recorder: FrozenRecorder,
) -> Iterator[Session]:
    session = make_session()
    session.cuda_graphs = CudaGraphCache(recorder, limit=3)
    yield session
    session.close()


def offload(pipe: Any) -> None:
    """As the method does, which calls a CPU "cpu:0" and then moves the model at each step."""
    remove_hook_from_module(pipe.unet)
    cpu_offload_with_hook(pipe.unet, torch.device("cpu"))


def move(pipe: Any) -> None:
    """diffusers hooks models again after each picture, and moves their Parameters."""
    offload(pipe)
    for parameter in pipe.unet.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("first", ["offload", "compile"])
def test_the_whole_unet_is_recorded_under_the_hook(
    first: str, session: Session, recorder: FrozenRecorder
) -> None:
    pipe, twin = sd15(0), sd15(0)
    if first == "offload":
        offload(pipe)
    compile_pipe(pipe, session=session, ignores=["vae"])
    if first == "compile":
        offload(pipe)
    for seed in range(3):
        found = draw_latents(pipe, seed=seed)
        expected = draw_latents(twin, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        move(pipe)
    (unet,) = compiled_state(pipe).components
    assert unet.foreign is None
    assert recorder.recorded == 3, "once in each picture"
    assert recorder.freed == 0
    undo_compile(pipe)


@pytest.mark.parametrize("first", ["offload", "compile"])
@pytest.mark.parametrize("last", ["unhook", "undo"])
def test_everything_is_as_before(session: Session, first: str, last: str) -> None:
    pipe = sd15(0)
    if first == "offload":
        offload(pipe)
    compile_pipe(pipe, session=session, ignores=["vae"])
    if first == "compile":
        offload(pipe)
    if last == "unhook":
        remove_hook_from_module(pipe.unet)
        undo_compile(pipe)
    else:
        undo_compile(pipe)
        hooked = vars(pipe.unet)["_old_forward"]
        assert hooked.__func__ is type(pipe.unet).forward
        remove_hook_from_module(pipe.unet)
    left = vars(pipe.unet).get("forward")
    assert left is None or left.__func__ is type(pipe.unet).forward
    assert "_old_forward" not in vars(pipe.unet)
    assert "__reduce_ex__" not in vars(pipe.unet)

"""What graphs and captures take for granted, looked at by value; and the check that never ends."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.backends.inductor.device_index import for_device
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.checking.spot_checks import SHARE, SpotChecks
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.validity.module_state import ModuleState
from onediff_ext.engine.validity.python_code import (
    PythonCode,
    foreign_class,
    foreign_methods,
    home_of,
)
from onediff_ext.engine.validity.tensor_contents import TensorContents
from onediff_ext.engine.validity.values import value_of
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.probe import unet_inputs
from onediff_ext.session.session import Session
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import sd15


class Settings:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1, 2], lambda v: v.append(3)),
        (lambda: [1, [2]], lambda v: v[1].append(3)),
        (lambda: {"a": 1}, lambda v: v.update(a=2)),
        (lambda: {1, 2}, lambda v: v.add(3)),
        (lambda: torch.zeros(3), lambda v: v.data.add_(1)),
        (lambda: Settings(scale=[1.0]), lambda v: v.scale.__setitem__(0, 0.2)),
        (lambda: functools.partial(max, [1]), lambda v: v.args[0].append(2)),
        (lambda: (1, {"a": [2]}), lambda v: v[1]["a"].clear()),
    ],
)
def test_values_that_change_in_place(
    make: Callable[[], Any], change: Callable[[Any], None]
) -> None:
    value = make()
    before = value_of(value)
    assert before == value_of(value)
    change(value)
    assert before != value_of(value)


def test_mappings_of_others_are_not_read() -> None:
    class Broken(Mapping[str, int]):
        def __getitem__(self, key: str) -> int:
            raise KeyError(key)

        def __iter__(self) -> Any:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    broken = Broken()
    assert value_of([broken]) == value_of([broken])
    assert value_of([broken]) != value_of([Broken()])


def test_equal_settings_of_other_classes_differ() -> None:
    class Other(Settings):
        pass

    assert value_of(Settings(a=1)) == value_of(Settings(a=1))
    assert value_of(Settings(a=1)) != value_of(Other(a=1))
    assert value_of(1) != value_of(True)


def test_a_module_is_what_its_attributes_hooks_and_children_are() -> None:
    def changes() -> dict[str, Callable[[nn.Sequential], object]]:
        return {
            "attribute": lambda m: setattr(m[0], "padding_mode", "circular"),
            "new attribute": lambda m: setattr(m[0], "other", 1),
            "private": lambda m: setattr(m[0], "_conv_forward", len),
            "list": lambda m: m[1].sizes.append(1),
            "hook": lambda m: m[1].register_forward_hook(lambda *a: None),
            "child": lambda m: setattr(m, "0", nn.Identity()),
            "class": lambda m: setattr(m[1], "__class__", nn.Identity),
            "own attribute": lambda m: setattr(m, "scale", 2),
        }

    for name, change in changes().items():
        model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(2, 2))
        model[1].sizes, model.scale, model[0].note = [2], 1, "a"
        state = ModuleState(list(model.modules()), model, ignored={"note"})
        model[0].note = "b"  # decides nothing
        model[0].weight = nn.Parameter(torch.zeros(2, 2, 1, 1))  # read at each call
        model.forward = lambda x: x  # runs around the rest
        assert state.holds(), name
        change(model)
        assert not state.holds(), name


def test_code_that_is_replaced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    code = PythonCode()
    code.watch([nn.Conv2d])
    first = code.look()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Conv2d, "_conv_forward", lambda *args: None)
        second = code.look()
        assert second != first
        assert "Conv2d is patched by" in str(foreign_class(nn.Conv2d))
        assert code.look(1) == second
    assert code.look(1) == second  # one moment: nothing is replaced within it
    assert code.look(2) == first  # as it was
    assert foreign_class(nn.Conv2d) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", functools.wraps(torch.cat)(lambda *args: None))
        assert code.look() != first
        assert code.torch_reason() == f"torch.cat is replaced by {__name__}"
        assert code.torch_reason((__name__,)) is None
    assert code.look() == first
    assert code.torch_reason() is None


def test_a_wrapper_does_not_hide_where_it_was_written() -> None:
    @functools.wraps(nn.Linear.forward)
    def wrapper(*args: Any) -> Any:
        return nn.Linear.forward(*args)

    assert wrapper.__module__ == "torch.nn.modules.linear"
    assert home_of(wrapper) == __name__
    layer = nn.Linear(2, 2)
    layer.forward = wrapper
    layer.to = wrapper  # no forward calls it
    assert list(foreign_methods(layer)) == ["forward"]


def test_contents_are_compared_once_for_each_picture() -> None:
    contents = TensorContents()
    tensors = [torch.randn(8, 4), torch.randn(2, 3, 3, 3).to(memory_format=torch.channels_last)]
    contents.watch(tensors)
    contents.settle()
    assert contents.look(1) == contents.look(2) == 0
    tensors[1].data.neg_()
    assert contents.look(2) == 0  # within a picture only what torch counts is seen
    assert contents.look(3) == 1
    assert contents.look(4) == 1
    tensors[0].data = tensors[0].data.clone()
    assert contents.look(5) == 2
    del tensors[0]
    contents.look(6)
    assert len(contents._watched) == 1


def test_checks_take_their_share_of_the_time() -> None:
    checks, chosen = SpotChecks(seed=1), 0
    start = time.perf_counter()
    for _ in range(400):
        with checks.forward(["a", "b"]):
            time.sleep(0.008)
            if checks.chosen is not None:
                with checks.comparing():
                    chosen += 1
                    time.sleep(0.002)
                assert checks.chosen is None
    assert chosen >= 1
    assert checks._spent_s <= 2 * SHARE * (time.perf_counter() - start)
    off = SpotChecks(enabled=False)
    for _ in range(50):
        with off.forward(["a"]):
            assert off.chosen is None


def always(checks: SpotChecks) -> None:
    """Choose a block for each forward."""
    checks._forwards_s = 1e9


@pytest.fixture
def pipe(make_session: Callable[..., Session], tmp_path: Path) -> Any:
    # Of a store of its own: a graph that was loaded is tried again by a worker when it is wrong.
    session = make_session(store=tmp_path)
    session.captures = CudaGraphCache(
        FrozenRecorder(), 4, None, session.spot_checks, session.found_wrong
    )
    pipe = sd15(seed=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    yield pipe
    undo_compile(pipe)


@torch.no_grad()
def step(pipe: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    given = unet_inputs(pipe.unet, generator, height_latent=8, width_latent=16)
    found = pipe.unet(**given).sample
    with compiled_state(pipe).components[0].paused():
        return found, pipe.unet(**given).sample


def test_a_graph_that_turns_wrong_in_use_is_found_dropped_and_reported(pipe: Any) -> None:
    session = compiled_state(pipe).session
    session.captures.drop_all("not in this test")
    session.captures._limit = 0
    for seed in range(4):
        step(pipe, seed)
    kinds = {runner.used for runner in compiled_state(pipe).components[0].runners}
    for kind in kinds:
        assert kind.state is KindState.READY
        kind.graph = lambda given, graph=kind.graph: graph(given) * 1.5
    always(session.spot_checks)
    for seed in range(200):
        if all(kind.state is KindState.FAILED for kind in kinds):
            break
        step(pipe, seed)
    assert all(kind.state is KindState.FAILED for kind in kinds)
    assert session.spot_checks.done >= len(kinds)
    found, expected = step(pipe, 300)
    torch.testing.assert_close(found, expected)
    reasons = [f.reason for f in session.fallbacks() if "in use" in f.reason]
    assert reasons
    path = reasons[0].partition("please attach ")[2].removesuffix(" to an issue")
    assert "differs from eager" in (session.library.folder.root / path).read_text()


def test_a_replay_that_turns_wrong_in_use_is_found_dropped_and_reported(pipe: Any) -> None:
    session = compiled_state(pipe).session
    captured = compiled_state(pipe).components[0].captured
    for seed in range(8):
        step(pipe, seed)
    assert captured.reason == ""
    (capture,) = session.captures._alive.values()
    replay = capture.recording.replay

    def wrong() -> None:
        replay()
        capture.recording.output[0].mul_(1.5)

    capture.recording.replay = wrong
    always(session.spot_checks)
    found, expected = step(pipe, 9)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(session.captures) == 0
    assert any("in use" in f.reason for f in session.fallbacks())
    found, expected = step(pipe, 10)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_check_costs_no_wrong_picture(pipe: Any) -> None:
    session = compiled_state(pipe).session
    always(session.spot_checks)
    for seed in range(12):
        found, expected = step(pipe, seed)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert session.spot_checks.done > 4
    assert not [f for f in session.fallbacks() if "in use" in f.reason]


def test_the_code_of_a_graph_names_another_gpu() -> None:
    source = (
        "with torch.cuda._DeviceGuard(0):\n    torch.cuda.set_device(0)\n"
        "    stream0 = get_raw_stream(0)\n    x = y.to(device(type='cuda', index=0))\n"
        "kernel = async_compile.triton('k', 'device=DeviceProperties(type=\\'cuda\\', index=0)')\n"
    )
    moved = for_device(source, 3)
    assert "_DeviceGuard(3)" in moved
    assert "set_device(3)" in moved
    assert "get_raw_stream(3)" in moved
    assert "device(type='cuda', index=3)" in moved
    assert moved.splitlines()[-1] == source.splitlines()[-1]  # what names the kernel in caches
    assert for_device(moved, 0) == source

"""Graphs and replays that turn wrong in use are found, dropped and reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.checking.spot_checks import SHARE, SpotChecks
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.probe import unet_inputs
from onediff_ext.session.session import Session
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import sd15


def test_spot_checks_take_their_share_of_the_time() -> None:
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
    session.cuda_graphs = CudaGraphCache(
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
    session.cuda_graphs.drop_all("not in this test")
    session.cuda_graphs._limit = 0
    for seed in range(4):
        step(pipe, seed)
    kinds = {runner.used for runner in compiled_state(pipe).components[0].runners}
    for kind in kinds:
        assert kind.state is KindState.READY
        kind.graph = lambda given, graph=kind.graph: [1.5 * graph(given)[0]]
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
    (capture,) = session.cuda_graphs._alive.values()
    replay = capture.recording.replay

    def wrong() -> None:
        replay()
        capture.recording.output[0].mul_(1.5)

    capture.recording.replay = wrong
    always(session.spot_checks)
    found, expected = step(pipe, 9)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(session.cuda_graphs) == 0
    assert any("in use" in f.reason for f in session.fallbacks())
    found, expected = step(pipe, 10)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_spot_checks_of_right_graphs_find_nothing(pipe: Any) -> None:
    session = compiled_state(pipe).session
    always(session.spot_checks)
    for seed in range(12):
        found, expected = step(pipe, seed)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert session.spot_checks.done > 4
    assert not [f for f in session.fallbacks() if "in use" in f.reason]

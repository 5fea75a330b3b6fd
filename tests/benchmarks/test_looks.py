"""`benchmarks.looks` times replays with and without looks, on a CPU with the tests' recorder."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.looks import cost_of_looks, without_looks
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.session.session import Session
from tests.support.cuda_graph_steps import captured, inputs, settle
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import sd15
from tests.support.session_fixtures import exports, open_session

__all__ = ["exports", "open_session"]


@torch.no_grad()
def test_a_step_has_looks_and_is_replayed_without_them(
    open_session: Callable[..., Session],
) -> None:
    session = open_session(build="never")
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=3)
    pipe = sd15(seed=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    settle(pipe, height=8, width=8)
    arguments = inputs(pipe.unet, 8, 8)
    looks: list[bool] = []
    holds = Snapshot.holds

    def counted(snapshot: Snapshot, epoch: object = None) -> bool:
        looks.append(True)
        return holds(snapshot, epoch)

    Snapshot.holds = counted  # type: ignore[method-assign]
    try:
        with without_looks():
            pipe.unet(**arguments)
            assert captured(pipe).replayed
            assert not looks
        row = cost_of_looks(lambda: pipe.unet(**arguments), torch.device("cpu"), rounds=1, steps=3)
    finally:
        Snapshot.holds = holds  # type: ignore[method-assign]
    assert len(looks) == 6  # three are timed as a whole, three in two parts
    assert 0 < row["before_ms"] < row["step_ms"] * 10
    assert row["behind_ms"] > 0
    undo_compile(pipe)

"""The memory of what a gate and DeepCache keep: what it counts as, and when it is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.guidance import attention_gate
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.session.session import Session
from tests.hosts.diffusers.gate_draws import GATE, GUIDED, STEPS, expected, reason_of
from tests.hosts.diffusers.test_chosen_guidance_steps import draw, eager
from tests.support import models
from tests.support.deepcache_draws import state_of
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder

NewSession = Callable[..., Session]
SIZES = [{"height": 72, "width": 104}, {"height": 64, "width": 72}, {"height": 104, "width": 72}]


def with_cuda_graphs(session: Session, most: int = 32) -> Session:
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), most, session.budget)
    return session


def bytes_of_a_gate(size: dict[str, int]) -> int:
    """Half of what the layers of cross-attention return in a forward of a batch with guidance."""
    pipe, found = models.sd15(), list[int]()
    for name, module in pipe.unet.named_modules():
        if name.endswith("attn2"):
            module.register_forward_hook(lambda _, __, output: found.append(output.nbytes))
    draw(pipe, **size)
    return sum(found) // STEPS // 2


def alive(pipe: Any) -> int:
    """How many sizes of a gate have memory."""
    return len(attention_gate._models[pipe.unet].alive)


def test_a_gates_outputs_count_with_the_cuda_graphs_that_hold_them(
    make_session: NewSession,
) -> None:
    pipe, session = models.sd15(), with_cuda_graphs(make_session())
    compile_pipe(pipe, session=session, ignores=["vae"])
    returnable = session.memory.returnable_bytes
    for size in SIZES[:2] * 3:
        eager(pipe, GATE, **size)
    kept = sum(map(bytes_of_a_gate, SIZES[:2]))
    cuda_graphs = session.cuda_graphs
    held = cuda_graphs.held_bytes()
    assert held["kept"] == cuda_graphs.kept_bytes == kept
    owned = {
        storage.data_ptr(): storage.nbytes()
        for captured in cuda_graphs._alive.values()
        for storage in captured.owned_storages
    }
    assert held["weights"] == sum(owned.values()) - kept  # each counts once
    assert returnable() == kept + held["weights"] + held["buffers"]
    cuda_graphs.drop_all("memory is short")
    assert cuda_graphs.held_bytes()["kept"] == cuda_graphs.kept_bytes == 0
    assert alive(pipe) == 0
    found, seen = eager(pipe, GATE, **SIZES[0])
    assert reason_of(seen) == ""
    assert relative_error(found, expected(models.sd15(), **SIZES[0])) < 1e-4


def test_deepcaches_features_count_too(make_session: NewSession) -> None:
    pipe, session = models.sd15(), with_cuda_graphs(make_session())
    compile_pipe(pipe, session=session, ignores=["vae"], deepcache=3)
    for size in SIZES[:2] * 3:
        draw(pipe, num_inference_steps=12, **size)
    kept = state_of(pipe).size_bytes
    assert session.cuda_graphs.held_bytes()["kept"] == session.cuda_graphs.kept_bytes == kept > 0
    session.cuda_graphs.drop_all("memory is short")
    assert session.cuda_graphs.kept_bytes == state_of(pipe).size_bytes == 0


def test_outputs_go_with_the_evicted_cuda_graphs_of_their_size(make_session: NewSession) -> None:
    pipe, session = models.sd15(), with_cuda_graphs(make_session(), most=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    for size in SIZES:
        for _ in range(3):
            eager(pipe, GATE, **size)
        assert alive(pipe) == 1
        assert session.cuda_graphs.kept_bytes == bytes_of_a_gate(size)


def test_outputs_of_many_sizes_stay_within_the_limit(make_session: NewSession) -> None:
    one = max(map(bytes_of_a_gate, SIZES))
    limit = one * 3 // 2
    pipe, session = models.sd15(), with_cuda_graphs(make_session(capture_limit_bytes=limit))
    compile_pipe(pipe, session=session, ignores=["vae"])
    by_hand = [expected(models.sd15(), **size) for size in SIZES]
    for _ in range(3):
        for size, latents in zip(SIZES, by_hand, strict=True):
            found, seen = eager(pipe, GATE, **size)
            assert relative_error(found, latents) < 1e-4
            assert reason_of(seen) == ""
            held = session.cuda_graphs.held_bytes()
            # The next recording frees what the last one has brought above the limit.
            assert held["kept"] + held["pools"] <= limit + one
    assert "limit" in session.cuda_graphs.dropped[-1]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_vae_finds_the_memory_of_the_outputs_free(
    is_compiled: bool, make_session: NewSession
) -> None:
    pipe, found = models.sd15(), list[tuple[int, int]]()
    session = with_cuda_graphs(make_session())
    if is_compiled:
        compile_pipe(pipe, session=session, ignores=["vae"])

    def look(*_: Any) -> None:
        session.cuda_graphs.drop_all("the VAE needs their memory")
        found.append((alive(pipe), len(steps)))

    steps = list[int]()
    pipe.vae.decoder.register_forward_pre_hook(look)
    for _ in range(3):
        _, seen = eager(
            pipe, GATE, output_type="np",
            callback_on_step_end=lambda _, index, __, given: (steps.append(alive(pipe)), given)[1],
        )  # fmt: skip
        assert reason_of(seen) == ""
        assert seen.counts == {"guidance": GUIDED, "prompt": STEPS - GUIDED}
    assert found == [(0, STEPS), (0, 2 * STEPS), (0, 3 * STEPS)]
    assert steps[STEPS - 2] == 1


def test_a_gates_step_that_is_the_last_one_keeps_nothing() -> None:
    pipe = models.sd15()
    plain = draw(pipe)
    found, seen = eager(pipe, "gate:0.9")
    assert torch.equal(found, plain)
    assert seen.gate is not None
    assert (seen.gate.frozen, seen.gate.reason, alive(pipe)) == (0, "", 0)
    assert seen.counts == {"guidance": STEPS}

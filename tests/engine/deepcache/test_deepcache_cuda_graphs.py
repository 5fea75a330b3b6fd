"""Full and shallow forwards as CUDA graphs: two for each shape, whose feature stays in its place.

As in `test_captured_forward.py`, a recorder for CPUs takes the place of CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state
from onediff_ext.hosts.diffusers.deepcache import deepcache_for, enable_deepcache
from tests.support import adapter_weights, models
from tests.support.deepcache_draws import counts, state_of
from tests.support.deepcache_draws import draw as draw_any
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder


def draw(pipe: Any, **options: Any) -> torch.Tensor:
    """Latents of an odd size, small since each call is compared with the model's own."""
    return draw_any(pipe, **{"steps": 10, "height": 72, "width": 104, **options})


@pytest.fixture
def recorder() -> FrozenRecorder:
    return FrozenRecorder()


@pytest.fixture
def session(make_session: Any, recorder: FrozenRecorder) -> Any:
    session = make_session()
    session.cuda_graphs = CudaGraphCache(recorder, limit=8)
    return session


def captured_pipe(session: Any, model: str, options: str) -> Any:
    """A compiled pipeline whose graphs have been compared with eager."""
    pipe = getattr(models, model)()
    compile_pipe(pipe, session=session, ignores=["vae"])
    draw(pipe, steps=3)
    session.cuda_graphs.drop_all("the test begins")
    return enable_deepcache(pipe, options)


@pytest.mark.parametrize("model", ["sd15", "sdxl"])
@pytest.mark.parametrize("depth", [0, 2])
def test_two_captures_a_shape_draw_what_is_drawn_without(model, depth, session, recorder):
    options = f"3 depth={depth}"
    reference = enable_deepcache(getattr(models, model)(), options)
    pipe = captured_pipe(session, model, options)
    before = recorder.recorded
    for side in (72, 64, 72):
        expected = draw(reference, height=side)
        assert relative_error(draw(pipe, height=side), expected) < 1e-4
        assert counts(pipe) == {"full": 4, "shallow": 6}
    assert len(session.cuda_graphs) == recorder.recorded - before == 4
    state = compiled_state(pipe)
    assert state is not None
    assert state.components[0].captured is not None
    assert state.components[0].captured.reason == ""
    assert [c.replays > 1 for c in session.cuda_graphs._alive.values()] == [True] * 4


def test_captures_of_an_earlier_picture_serve_the_next_at_the_same_address(session, recorder):
    pipe = captured_pipe(session, "sd15", "3")
    draw(pipe)
    made, cache = recorder.recorded, state_of(pipe)
    assert made > 0
    held = cache.size_bytes
    assert held > 0  # by the captures: the picture is over
    first = draw(pipe)
    assert recorder.recorded == made
    assert cache.size_bytes == held
    with deepcache_for(pipe, DeepCacheOptions(1)):
        draw(pipe)
    with deepcache_for(pipe, DeepCacheOptions(3)):
        again = draw(pipe)
    assert torch.equal(again, first)
    assert len(session.cuda_graphs) == 3  # and one without DeepCache
    session.cuda_graphs.drop_all("memory is short")
    assert cache.size_bytes == 0


def test_a_lora_of_another_weight_makes_new_captures_and_the_same_latents(session):
    pipe = captured_pipe(session, "sd15", "3")
    reference = models.sd15()
    for one in (pipe, reference):
        one.load_lora_weights(adapter_weights.lora_tensors(one, text=False), adapter_name="one")
    enable_deepcache(reference, 3)
    for weight in (0.5, 1.5):
        for one in (pipe, reference):
            one.set_adapters("one", weight)
        for _ in range(2):
            assert relative_error(draw(pipe), draw(reference)) < 1e-4

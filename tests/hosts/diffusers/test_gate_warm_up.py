"""A warm-up for pictures with guidance steps: the first picture finds what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.hosts.diffusers.warmup import pipe_warm_up
from onediff_ext.session.session import Session
from tests.hosts.diffusers.gate_draws import GATE, INTERVAL, expected
from tests.hosts.diffusers.test_chosen_guidance_steps import attributes, draw, eager
from tests.support import models, transformer_models
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder

NewSession = Callable[..., Session]
SHAPES = [BatchShape(104, 72, 2), BatchShape(64, 72, 2)]
SIZES: list[dict[str, Any]] = [{"width": 104, "height": 72}, {"width": 64, "height": 72}]


def attended(session: Session) -> list[bool]:
    """Whether each kind that blocks need after a gate has its graph."""
    kinds = [kind for kind in session.kinds if "attended" in kind.key.entries["call"]]
    return [kind.graph is not None for kind in kinds]


@pytest.mark.parametrize("model", ["sd15", "sdxl"])
def test_the_first_picture_finds_all_graphs(
    model: str, make_session: NewSession, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    pipe, session = getattr(models, model)(), make_session(store=store, build="background")
    compile_pipe(pipe, session=session, ignores=["vae"], guidance_steps=GATE)
    names = attributes(pipe)
    report = pipe_warm_up(pipe, SHAPES).run()
    assert attributes(pipe) == names
    assert report.built == session.count("built") == len(session.kinds)
    assert attended(session) == [True, True]
    assert [figures.shape for figures in report.sizes] == SHAPES
    by_hand = expected(getattr(models, model)(), **SIZES[0])
    assert relative_error(draw(pipe, **SIZES[0]), by_hand) < 1e-4
    assert session.count("built") == report.built
    # And those of the next process, which may build nothing.
    pipe, session = getattr(models, model)(), make_session(store=store, build="never")
    compile_pipe(pipe, session=session, ignores=["vae"], guidance_steps=GATE)
    assert relative_error(draw(pipe, **SIZES[0]), by_hand) < 1e-4
    assert attended(session) == [True, True]
    assert all(kind.graph is not None for kind in session.kinds)
    assert session.fallbacks() == []


def test_without_guidance_steps_nothing_is_built_for_them(make_session: NewSession) -> None:
    pipe, session = models.sd15(), make_session()
    compile_pipe(pipe, session=session, ignores=["vae"])
    pipe_warm_up(pipe, SHAPES[:1]).run()
    assert attended(session) == []
    pipe_warm_up(pipe, SHAPES[:1], guidance_steps=GuidanceOptions.parse(INTERVAL)).run()
    assert attended(session) == []
    pipe_warm_up(pipe, SHAPES[:1], guidance_steps=GuidanceOptions.parse("gate:0.9")).run()
    assert attended(session) == [True, True]


@pytest.mark.parametrize(("text", "forwards"), [(GATE, 3), (INTERVAL, 2)])
def test_the_forwards_of_both_parts_are_captured(
    text: str, forwards: int, make_session: NewSession
) -> None:
    """Whole, the gate's step, and frozen or the prompt's half alone, at each size."""
    pipe, session, recorder = models.sd15(), make_session(), FrozenRecorder()
    session.cuda_graphs = CudaGraphCache(recorder, limit=16)
    compile_pipe(pipe, session=session, ignores=["vae"])
    for _ in range(2):
        pipe_warm_up(pipe, SHAPES, guidance_steps=GuidanceOptions.parse(text)).run()
        assert len(session.cuda_graphs) == recorder.recorded == forwards * len(SHAPES)
    by_hand, _ = eager(models.sd15(), text, **SIZES[0])
    found, _ = eager(pipe, text, **SIZES[0])
    assert relative_error(found, by_hand) < 1e-4


def test_guidance_steps_that_pictures_cannot_have(make_session: NewSession) -> None:
    session, gate = make_session(), GuidanceOptions.parse(GATE)
    distilled, transformer = models.lcm(), transformer_models.sd3()
    for pipe in (distilled, transformer):
        compile_pipe(pipe, session=session, ignores=["vae"])
    pipe_warm_up(distilled, SHAPES[:1], guidance_steps=gate).run()
    assert attended(session) == []
    with pytest.raises(OptionError, match="no cross-attention can be frozen"):
        pipe_warm_up(transformer, SHAPES[:1], guidance_steps=gate)

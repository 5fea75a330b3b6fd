"""A transformer's projections as kinds of their own, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_ext.hosts.diffusers import blocks as families
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.session.session import Session
from tests.support.draw import draw_latents, relative_error
from tests.support.models import sd2, sd15, sdxl


@pytest.mark.parametrize("make", [sd15, sd2, sdxl])
def test_projections_are_kinds_and_equal_eager(
    make: Callable[..., Any],
    make_session: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "small_blocks_pay", lambda: True)
    pipe = make(seed=5)
    expected = draw_latents(pipe)
    compile_pipe(pipe, session=make_session(build="wait"), ignores=["vae"])
    draw_latents(pipe)
    found = draw_latents(pipe)
    state = compiled_state(pipe)
    assert state is not None
    labels = {kind.label.rsplit(" ", 1)[0] for kind in state.session.kinds}
    assert {"Transformer2DModel in", "Transformer2DModel out"} <= labels
    assert not state.session.fallbacks()
    assert relative_error(found, expected) < 1e-4
    undo_compile(pipe)
    assert not any("_operate_on_continuous_inputs" in vars(m) for m in pipe.unet.modules())
    assert torch.equal(draw_latents(pipe), expected)

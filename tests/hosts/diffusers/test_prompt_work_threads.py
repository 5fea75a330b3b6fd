"""Other threads beside a forward whose prompt's part is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from onediff_ext.engine.blocks.prompt_recipe import Done
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.session.session import Session
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.transformer_draws import draw
from tests.support.transformer_models import MODELS

SIZE = (64, 96, 40, 1)


@pytest.mark.parametrize("name", ["flux", "z_image"])
def test_undone_by_another_thread(
    name: str, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers come back after the forward: before, they would embed what is embedded."""
    pipe, twin, session = MODELS[name].make(), MODELS[name].make(), make_session()
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    compile_pipe(pipe, session=session, ignores=("vae",))
    for _ in range(2):
        expected = draw(twin, name, SIZE)
        assert relative_error(draw(pipe, name, SIZE), expected) < 1e-4
    own, thread = Done.set, threading.Thread(target=undo_compile, args=(pipe,))

    @contextmanager
    def undone_within(done: Done) -> Iterator[None]:
        with own(done):
            if thread.ident is None:
                thread.start()
                thread.join(0.5)
            yield

    monkeypatch.setattr(Done, "set", undone_within)
    assert relative_error(draw(pipe, name, SIZE), expected) < 1e-4
    thread.join(10)
    assert not thread.is_alive()
    assert not [m for m in pipe.transformer.modules() if "forward" in vars(m)]
    assert relative_error(draw(pipe, name, SIZE), expected) < 1e-4


def test_a_thread_that_still_draws_replaces_nothing_again(
    make_session: Callable[..., Session],
) -> None:
    """It has taken the model's forward before `undo_compile` of another thread restored all."""
    pipe, session = MODELS["flux"].make(), make_session()
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    compile_pipe(pipe, session=session, ignores=("vae",))
    draw(pipe, "flux", SIZE)
    work = vars(pipe.transformer)["forward"].prompt_work
    work.remove()
    draw(pipe, "flux", SIZE)
    assert "forward" not in vars(pipe.transformer.context_embedder)

"""A session whose CUDA graphs are recorded by the CPU's recorder of the tests, and its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.session.session import Session
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import sd15


@pytest.fixture
def recorder() -> FrozenRecorder:
    return FrozenRecorder()


@pytest.fixture
def session(make_session: Callable[..., Session], recorder: FrozenRecorder) -> Session:
    session = make_session()
    session.cuda_graphs = CudaGraphCache(recorder, limit=3)
    return session


@pytest.fixture
def pipe(session: Session) -> Iterator[Any]:
    pipe = sd15(seed=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    yield pipe
    undo_compile(pipe)

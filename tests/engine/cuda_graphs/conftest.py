"""A session whose CUDA graphs are recorded by the CPU's recorder of the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.session.session import Session
from tests.support.frozen_recorder import FrozenRecorder


@pytest.fixture
def recorder() -> FrozenRecorder:
    return FrozenRecorder()


@pytest.fixture
def session(make_session: Callable[..., Session], recorder: FrozenRecorder) -> Session:
    session = make_session()
    session.cuda_graphs = CudaGraphCache(recorder, limit=3)
    return session

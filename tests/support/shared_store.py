"""Sessions with one store for the whole run, so that a graph is built once for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers.compile import new_session
from onediff_ext.session.session import Session
from tests.support.quick_builds import quick_builds, quick_loads

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that fills up while the tests run, in several processes even."""
    if given := os.environ.get("ONEDIFF_TEST_STORE"):
        return Path(given)
    return tmp_path_factory.getbasetemp() / "shared-store"


@pytest.fixture
def make_session(shared_store: Path) -> Callable[..., Session]:
    """Sessions over the shared store; the eager backend unless another is named."""
    usual = os.environ.get("ONEDIFF_TEST_BACKEND", "eager")

    def make(backend: str = usual, **options: object) -> Session:
        return new_session(
            CompileOptions.parse(
                {"backend": backend, "build": "wait", "store": shared_store, **options}
            )
        )

    return make


@pytest.fixture(scope="module", autouse=True)
def quick_eager_graphs() -> Iterator[None]:
    """Graphs of the backend "eager" are built and loaded once for all tests of a process."""
    with quick_builds(), quick_loads():
        yield

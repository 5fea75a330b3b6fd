"""Sessions with shared stores, so that each graph is built only once.

Graphs of real compilers take seconds each. Their store is shared by all processes of a run and kept
for the next run, until anything changes that may decide a graph's bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers.compile import new_session
from onediff_ext.session.session import Session
from tests.support.kept_builds import kept_builds
from tests.support.kept_folders import GRAPH_SOURCES, kept_folder
from tests.support.quick_builds import quick_builds, quick_loads

__all__ = ["compiling_worker", "make_session", "quick_eager_graphs", "run_store", "shared_store"]

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_store() -> Path:
    """The kept store, in the user's cache folder; ``ONEDIFF_TEST_STORE`` names another folder."""
    if given := os.environ.get("ONEDIFF_TEST_STORE"):
        return Path(given)
    return kept_folder("test-stores", GRAPH_SOURCES)


@pytest.fixture(scope="session")
def run_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for the graphs of this process, empty at first."""
    return tmp_path_factory.getbasetemp() / "run-store"


@pytest.fixture(scope="module")
def compiling_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """One worker for what the sessions of a file compile; it starts with the first program."""
    worker = WorkerProcess("inductor", tmp_path_factory.mktemp("compiler"))
    yield worker
    worker.close()


@pytest.fixture
def make_session(
    shared_store: Path, run_store: Path, compiling_worker: WorkerProcess
) -> Iterator[Callable[..., Session]]:
    """Sessions over these stores; the eager backend unless another is named."""
    usual = os.environ.get("ONEDIFF_TEST_BACKEND", "eager")

    def make(backend: str = usual, **options: object) -> Session:
        store = run_store if backend == "eager" else shared_store
        return new_session(
            CompileOptions.parse({"backend": backend, "build": "wait", "store": store, **options})
        )

    with kept_builds(compiling_worker):
        yield make


@pytest.fixture(scope="module", autouse=True)
def quick_eager_graphs() -> Iterator[None]:
    """Graphs of the backend "eager" are built and loaded once for all tests of a process."""
    with quick_builds(), quick_loads():
        yield

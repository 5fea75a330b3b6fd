"""Sessions with shared stores, so that each graph is built only once.

Graphs of real compilers take seconds each. Their store is shared by all processes of a run and kept
for the next run, until anything changes that may decide a graph's bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import onediff_ext
from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers.compile import new_session
from onediff_ext.session.session import Session
from onediff_ext.store.default_root import ROOT_VARIABLE, default_root
from tests.support.quick_builds import quick_builds, quick_loads

torch.set_num_threads(1)


_KEPT_STORES = 2


@pytest.fixture(scope="session")
def shared_store() -> Path:
    """The kept store, in the user's cache folder; ``ONEDIFF_TEST_STORE`` names another folder."""
    if given := os.environ.get("ONEDIFF_TEST_STORE"):
        return Path(given)
    stores = default_root({**os.environ, ROOT_VARIABLE: ""}) / "test-stores"
    store = stores / _digest_of_what_builds()
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(store)
    by_last_use = sorted(stores.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for old in by_last_use[:-_KEPT_STORES]:
        shutil.rmtree(old, ignore_errors=True)
    return store


def _digest_of_what_builds() -> str:
    """Digest of the package's sources and of torch's version, 16 hexadecimal digits."""
    package = Path(onediff_ext.__file__).parent
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in ("engine", "backends", "building", "hosts"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def run_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for the graphs of this process, empty at first."""
    return tmp_path_factory.getbasetemp() / "run-store"


@pytest.fixture
def make_session(shared_store: Path, run_store: Path) -> Callable[..., Session]:
    """Sessions over these stores; the eager backend unless another is named."""
    usual = os.environ.get("ONEDIFF_TEST_BACKEND", "eager")

    def make(backend: str = usual, **options: object) -> Session:
        store = run_store if backend == "eager" else shared_store
        return new_session(
            CompileOptions.parse({"backend": backend, "build": "wait", "store": store, **options})
        )

    return make


@pytest.fixture(scope="module", autouse=True)
def quick_eager_graphs() -> Iterator[None]:
    """Graphs of the backend "eager" are built and loaded once for all tests of a process."""
    with quick_builds(), quick_loads():
        yield

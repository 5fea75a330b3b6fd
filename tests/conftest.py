"""Settings of every test: one thread, no network, a store of its own, fixed random numbers.

Tests marked `gpu` are skipped where torch finds no CUDA device.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from onediff_ext.core import garbage_collection
from onediff_ext.store.default_root import default_root
from tests.support.kept_folders import EXPORT_SOURCES, EXPORTS_VARIABLE, kept_folder
from tests.support.longest_files import longest_first

_SETTINGS = {
    # Test models are tiny: more threads only wait for each other, and sums change with them.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # glibc reads these at a process's start. It returns each large tensor to the system otherwise,
    # and half of the time of a test that draws goes into getting the pages again.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
_store = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells ignore it for background jobs; the programs under test would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before any test module loads torch, which reads these once.
    os.environ.update(_SETTINGS)
    # Bytecode is kept, whatever the caller's shell says: otherwise each process of the run compiles
    # all test modules and their asserts, and each program under test the whole package.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # pytest listens to each logger. A listener makes torch write down all of its tracing.
    vars(logging.getLogger("torch.__trace"))["addHandler"] = lambda handler: None
    # One for all processes and runs. Its content is checked at each use.
    os.environ["ONEDIFF_COMPILER_FILES"] = str(default_root() / "compiler-files")
    # xdist would begin with the files of most tests: the longest ones have few.
    config.option.loadscopereorder = False
    if not hasattr(config, "workerinput"):  # one for all processes of the run
        os.environ[EXPORTS_VARIABLE] = str(kept_folder("test-exports", EXPORT_SOURCES))
    os.environ["ONEDIFF_STORE"] = config.stash[_store] = tempfile.mkdtemp(prefix="onediff-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_store, ""):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)


def pytest_collection_finish() -> None:
    # Half a million objects of the imported libraries: each full collection takes a quarter of a
    # second longer with them.
    gc.freeze()
    # Python counts frozen objects one by one, and each command under test asks several times.
    known = {**vars(gc), "get_freeze_count": lambda: sys.maxsize}
    vars(garbage_collection)["gc"] = SimpleNamespace(**known)


@pytest.fixture(autouse=True)
def _forked_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers of builds are forked, but in tests of their start."""
    # A patch of its own: one that all tests share would be undone after all other fixtures.
    with pytest.MonkeyPatch.context() as patch:
        if "onediff_ext.building.worker_process" in sys.modules:  # else nothing starts one
            from tests.support.forked_workers import fork_workers

            if not request.node.get_closest_marker("starts_workers"):
                fork_workers(patch)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _no_gpu_reason()):
        pytest.skip(reason)
    _seed_torch(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    # Once more, since fixtures may have used random numbers, depending on the order of tests.
    _seed_torch(2)


def pytest_runtest_logfinish() -> None:
    # Between two tests. Each full collection takes half a second with the graphs of some files.
    if builds := sys.modules.get("tests.support.quick_builds"):
        builds.freeze_loaded()


def _seed_torch(seed: int) -> None:
    """Give each test the same random numbers; pytest-randomly does it for all but torch."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@functools.cache
def _no_gpu_reason() -> str:
    """Why tests marked `gpu` cannot run here, or ``""``. Loads torch, so it is called late."""
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device; torch sees none here"

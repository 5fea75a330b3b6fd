"""What holds for every test: one thread, no network, a store of its own, the same random numbers.

And no GPU unless there is one.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import tempfile

import pytest

_SETTINGS = {
    # Test models are tiny: more threads only wait for each other, and sums change with them.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
_store = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As a shell does for what it runs in the background; the programs under test would too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before any test module can load torch, which reads these once.
    os.environ.update(_SETTINGS)
    os.environ["ONEDIFF_STORE"] = config.stash[_store] = tempfile.mkdtemp(prefix="onediff-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_store], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(reason)
    _seed_torch(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    # Once more: what was drawn for fixtures depends on the tests before, whose order is random.
    _seed_torch(2)


def _seed_torch(seed: int) -> None:
    """Give a test the numbers it always gets; pytest-randomly does it for all but torch."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@functools.cache
def _why_no_gpu() -> str:
    """Why tests marked `gpu` cannot run here; "" if they can. Loads torch, so asked late."""
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device; torch sees none here"

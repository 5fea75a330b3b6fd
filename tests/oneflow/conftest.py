"""OneFlow where it is installed; elsewhere the tests that need it are skipped, with its reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.shared_store import shared_store  # noqa: F401  (a fixture)

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def flow():
    """The `oneflow` module."""
    from onediff_ext.backends.oneflow.availability import process_reason

    reason = process_reason()
    if reason is not None:
        pytest.skip(reason)
    import oneflow

    return oneflow


@pytest.fixture
def run_apart():
    """Runs a program in a process of its own, since some calls of OneFlow's end the process."""

    def run(code: str, *arguments: object, timeout_s: float = 300) -> str:
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
            capture_output=True, text=True, cwd=ROOT, timeout=timeout_s,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert result.returncode == 0, (result.returncode, result.stderr[-3000:])
        return result.stdout

    return run

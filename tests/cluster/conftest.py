"""Tests that start Ray run one file at a time: they count Ray's processes and share two cores."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="module", autouse=True)
def _one_ray_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.module.__name__.rpartition(".")[2] not in ("test_cluster_faults", "test_ray_pool"):
        yield
        return
    with FileLock(Path(tempfile.gettempdir()) / "onediff-ray-tests.lock"):
        yield

"""Tests of minutes run on request; under faults a run may also end before its faults come."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="module", autouse=True)
def _long_ones_on_request(request: pytest.FixtureRequest) -> None:
    long_ones = ("test_cluster_faults", "test_driver_killed", "test_late_node")
    is_long = request.module.__name__.endswith(long_ones)
    if is_long and not os.environ.get("ONEDIFF_RAY_TESTS"):
        pytest.skip(
            "takes a minute or two, and depends on the machine's speed: set ONEDIFF_RAY_TESTS=1"
        )

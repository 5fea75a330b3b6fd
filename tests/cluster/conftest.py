"""The test of a cluster under faults runs on request: a run may end before its faults come."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="module", autouse=True)
def _faults_on_request(request: pytest.FixtureRequest) -> None:
    has_faults = request.module.__name__.endswith("test_cluster_faults")
    if has_faults and not os.environ.get("ONEDIFF_RAY_TESTS"):
        pytest.skip("takes a minute, and depends on the machine's speed: set ONEDIFF_RAY_TESTS=1")

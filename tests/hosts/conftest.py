"""Graphs of the backend "eager" are built and loaded once for all tests of the hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    from tests.quick import quick_builds, quick_loads

    with quick_builds(), quick_loads():
        yield

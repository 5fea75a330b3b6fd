"""Neo as a stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.forge_stand_in import ForgeStandIn, running


@pytest.fixture
def host() -> Iterator[ForgeStandIn]:
    with running("neo") as stand_in:
        yield stand_in

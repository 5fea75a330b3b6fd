"""A job of Forge's WebUI, for tests with a store of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onediff_ext.core.options import CompileOptions
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_stand_in import FakeProcessing


@pytest.fixture
def job(graphs: GraphsForJobs, options: CompileOptions) -> Callable[[], FakeProcessing]:
    """A job that has come as far as sampling."""

    def start() -> FakeProcessing:
        p = FakeProcessing()
        graphs.begin(p, options)
        graphs.before_sampling(p)
        return p

    return start

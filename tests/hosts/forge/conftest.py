"""Forge, Neo and reForge as stand-ins, their graphs, and a job of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from onediff_ext.core.options import CompileOptions
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_stand_in import ADAPTERS, FakeProcessing, ForgeStandIn, running


@pytest.fixture(params=sorted(ADAPTERS))
def host(request: pytest.FixtureRequest) -> Iterator[ForgeStandIn]:
    with running(request.param) as stand_in:
        yield stand_in


@pytest.fixture
def graphs(host: ForgeStandIn) -> Iterator[GraphsForJobs]:
    graphs = GraphsForJobs(ADAPTERS[host.name]())
    yield graphs
    graphs.close()


@pytest.fixture
def job(graphs: GraphsForJobs, options: CompileOptions) -> Callable[[], FakeProcessing]:
    """A job that has come as far as sampling."""

    def start() -> FakeProcessing:
        p = FakeProcessing()
        graphs.begin(p, options)
        graphs.before_sampling(p)
        return p

    return start

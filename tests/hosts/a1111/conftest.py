"""A1111's adapter on a stand-in of the host, and jobs over one store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.a1111.host import A1111Host
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.a1111_stand_in import (
    A1111StandIn,
    FakeProcessing,
    a1111,
)


@pytest.fixture
def host() -> Iterator[A1111StandIn]:
    with a1111() as stand_in:
        yield stand_in


@pytest.fixture
def graphs(host: A1111StandIn) -> GraphsForJobs:
    return GraphsForJobs(A1111Host())


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    """One store for all tests: what one has built the next one loads."""
    store = tmp_path_factory.mktemp("store")
    return CompileOptions(backend="eager", build="wait", store=store, workers=1)


@pytest.fixture
def job(graphs: GraphsForJobs, options: CompileOptions) -> Callable[..., FakeProcessing]:
    """A job that has come as far as sampling."""

    def start(**changes: Any) -> FakeProcessing:
        p = FakeProcessing()
        graphs.begin(p, options, **changes)
        graphs.before_sampling(p)
        return p

    return start


@pytest.fixture
def built(host: A1111StandIn, graphs: GraphsForJobs, job: Any) -> None:
    """Every kind has a graph that was compared with eager."""
    p = job()
    for _ in range(2):
        host.unet()
        host.decode()
    graphs.end(p)
    assert graphs.status().running == "compiled", graphs.status()

"""CUDA graphs of Forge's and reForge's UNets: what a GPU cannot record, and what none can compare.

CUDA graphs need a GPU. A recorder for CPUs records what they record, and the stand-in's UNet fails
while it is recorded where a GPU would.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onediff_ext.hosts.timestep_embedding import EmbeddedCounts, TimestepEmbedding
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_blocks_stand_in import embed_from_the_cpu
from tests.support.forge_recorded_jobs import assert_right, captured, recorded_job, settle, step
from tests.support.forge_stand_in import ADAPTERS, FakeProcessing, ForgeStandIn
from tests.support.strict_recorder import StrictRecorder


@pytest.fixture
def graphs(host: ForgeStandIn) -> GraphsForJobs:
    return GraphsForJobs(ADAPTERS[host.name]())


@pytest.fixture
def job(
    graphs: GraphsForJobs, recorder: StrictRecorder, tmp_path: Path
) -> Iterator[FakeProcessing]:
    with recorded_job(graphs, recorder, tmp_path) as p:
        yield p


@pytest.mark.usefixtures("job")
def test_the_unet_is_recorded_and_replayed(
    host: ForgeStandIn, graphs: GraphsForJobs, recorder: StrictRecorder
) -> None:
    settle(host)
    assert recorder.recorded == 1
    assert captured(graphs).reason == ""
    assert_right(host, graphs, 50)
    assert_right(host, graphs, 50, timestep=17.5)
    assert recorder.recorded == 1


def test_the_timesteps_are_embedded_exactly_as_by_the_host(
    host: ForgeStandIn, graphs: GraphsForJobs, job: FakeProcessing
) -> None:
    if host.name == "reforge":
        pytest.skip("reForge computes them where they are")
    home = host.classes.modules["backend.nn.unet"]
    ours = home.timestep_embedding
    assert isinstance(ours, TimestepEmbedding)
    for timesteps in (torch.tensor([321.0, 0.0]), torch.tensor([999.0]), torch.tensor([3, 4])):
        for width in (8, 320):
            for _ in range(2):
                assert torch.equal(ours(timesteps, width), embed_from_the_cpu(timesteps, width))
        assert torch.equal(ours(timesteps, 3, repeat_only=True), timesteps[:, None].expand(-1, 3))
    graphs.end(job)
    assert home.timestep_embedding is embed_from_the_cpu


def test_an_embedding_that_is_another_goes_on_as_it_is(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    recorder: StrictRecorder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It cannot be recorded, so the blocks run through their graphs one by one."""
    if host.name == "reforge":
        pytest.skip("reForge computes them where they are")
    home = host.classes.modules["backend.nn.unet"]

    def shifted(timesteps: torch.Tensor, dim: int, max_period: float = 10000) -> torch.Tensor:
        return embed_from_the_cpu(timesteps + 1, dim, max_period)

    monkeypatch.setattr(home, "timestep_embedding", shifted)
    with recorded_job(graphs, recorder, tmp_path):
        settle(host)
        assert "not permitted" in captured(graphs).reason
        assert graphs.session is not None
        before = sum(kind.calls for kind in graphs.session.kinds)
        assert_right(host, graphs, 50)
        assert sum(kind.calls for kind in graphs.session.kinds) > before
    assert home.timestep_embedding is shifted


@pytest.mark.usefixtures("job")
def test_a_controlnet_handed_on_to_the_unet_is_no_hindrance(
    host: ForgeStandIn, graphs: GraphsForJobs, recorder: StrictRecorder
) -> None:
    if host.name == "reforge":
        pytest.skip("reForge keeps it to itself")
    settle(host, control_model=object())
    assert recorder.recorded == 1
    assert captured(graphs).reason == ""
    assert_right(host, graphs, 50, control_model=object())


@pytest.mark.usefixtures("job")
def test_what_a_controlnet_adds_is_part_of_the_shape(
    host: ForgeStandIn, graphs: GraphsForJobs, recorder: StrictRecorder
) -> None:
    settle(host)
    settle(host, control=0.5)
    assert recorder.recorded == 2
    assert captured(graphs).reason == ""
    for strength in (0.5, -0.7):
        assert_right(host, graphs, 50, control=strength)
    assert recorder.recorded == 2
    assert not torch.equal(step(host, 50), step(host, 50, control=0.5))


def test_nothing_is_left_behind(
    host: ForgeStandIn, graphs: GraphsForJobs, recorder: StrictRecorder, tmp_path: Path
) -> None:
    before = host.attributes()
    with recorded_job(graphs, recorder, tmp_path):
        settle(host)
        assert host.attributes() != before
    assert host.attributes() == before


def test_counts_are_embedded_once_and_lie_where_the_model_is() -> None:
    calls: list[int] = []

    def own(counts: torch.Tensor, dim: int) -> torch.Tensor:
        calls.append(dim)
        return counts[:, None].float().expand(-1, dim)

    elsewhere = torch.device("meta")
    ours = EmbeddedCounts(own, elsewhere)
    first = ours(torch.arange(5), 4)
    assert first.device == elsewhere
    assert ours(torch.arange(5), 4) is first
    assert ours(torch.arange(5) + 1, 4) is not first
    assert ours(torch.arange(6), 4).shape == (6, 4)
    assert calls == [4, 4, 4]
    # Timesteps lie there already, and change at each step.
    assert ours(torch.zeros(2, device="meta"), 4).shape == (2, 4)
    assert calls == [4, 4, 4, 4]

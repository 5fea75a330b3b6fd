"""What Neo's users complain of in its own Torch Compile, on a stand-in of Neo with OneDiff.

CUDA graphs are recorded on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_recorded_jobs import assert_right, captured, recorded_job, settle, step
from tests.support.forge_stand_in import ADAPTERS, ForgeStandIn
from tests.support.strict_recorder import StrictRecorder

KINDS = 3  # of the stand-in's UNet
FORWARDS = 3


@pytest.fixture
def compiled(
    host: ForgeStandIn, recorder: StrictRecorder, tmp_path: Path
) -> Iterator[GraphsForJobs]:
    """A job whose UNet has its graphs and a CUDA graph; three forwards are kept at most."""
    graphs = GraphsForJobs(ADAPTERS["neo"]())
    with recorded_job(graphs, recorder, tmp_path, FORWARDS):
        settle(host)
        assert recorder.recorded == 1
        yield graphs
        assert captured(graphs).reason == ""
        assert graphs.session is not None
        assert graphs.session.fallbacks() == []
    graphs.close()


def assert_nothing_is_built(graphs: GraphsForJobs) -> None:
    session = graphs.session
    assert session is not None
    assert len(session.kinds) == KINDS
    assert len(session.library.entries()) == KINDS


def test_complaint_lora_ignored_or_wrong(host: ForgeStandIn, compiled: GraphsForJobs) -> None:
    plain = step(host, 50)
    for strength in (0.5, 0.2):
        host.merge_lora(strength)
        assert_right(host, compiled, 50)
        settle(host)
        assert_right(host, compiled, 50)
        assert not torch.allclose(step(host, 50), plain, atol=1e-3)
    host.merge_lora(0.0)
    torch.testing.assert_close(step(host, 50), plain, rtol=1e-4, atol=1e-5)
    assert_nothing_is_built(compiled)


def test_complaint_controlnet_takes_minutes(
    host: ForgeStandIn, compiled: GraphsForJobs, recorder: StrictRecorder
) -> None:
    """On and off, in part of the steps, at another strength: one more recording, and no build."""
    for control in (0.5, 0.0, 0.5, -0.7):
        assert_right(host, compiled, 50, control=control)
        settle(host, control=control)
        assert_right(host, compiled, 50, control=control)
    assert recorder.recorded == 2
    assert_nothing_is_built(compiled)


def test_complaint_controlnet_runs_out_of_memory(
    host: ForgeStandIn, compiled: GraphsForJobs
) -> None:
    """Each size has a CUDA graph with and without it; the oldest ones go."""
    assert compiled.session is not None
    for size in ((8, 8), (6, 10), (9, 7)):
        for control in (0.5, 0.0):
            settle(host, control=control, size=size)
            assert_right(host, compiled, 50, control=control, size=size)
    assert compiled.session.cuda_graphs.made > FORWARDS
    assert len(compiled.session.cuda_graphs) <= FORWARDS
    assert_nothing_is_built(compiled)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_complaint_recompiles_at_another_size_or_batch(
    host: ForgeStandIn, compiled: GraphsForJobs, batch: int
) -> None:
    for size in ((8, 8), (17, 25), (6, 11)):
        assert_right(host, compiled, 50, size=size, batch=batch)
    assert_nothing_is_built(compiled)

"""Whatever goes wrong while a block is looked at makes blocks eager and never ends a picture.

A host of another version is the usual cause: a name is missing, or a function takes other
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.running.block_weights import BlockWeights
from onediff_ext.engine.running.graph_check import GraphCheck
from onediff_ext.engine.running.text_kv import BlockTextKv
from onediff_ext.hosts import forge_blocks as blocks
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_stand_in import FakeProcessing, ForgeStandIn

Draw = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def draw(host: ForgeStandIn, graphs: GraphsForJobs, tmp_path: Path) -> Draw:
    """Draws and decodes as one job."""
    options = CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1)

    def job() -> tuple[torch.Tensor, torch.Tensor]:
        p = FakeProcessing()
        graphs.begin(p, options)
        graphs.before_sampling(p)
        result = host.draw(), host.decode()
        graphs.end(p)
        return result

    return job


def broken(*_args: Any, **_kwargs: Any) -> Any:
    raise AttributeError("module 'backend.nn' has no attribute 'planted'")


def ids(values: list[tuple[type, str]]) -> list[str]:
    return [f"{cls.__name__}.{name}" for cls, name in values]


AT_FIRST = [
    (blocks.ForgeTransformer, "bind"),
    (blocks.ForgeTransformer, "describe"),
    (blocks.ForgeTransformer, "packages"),
    (blocks.ForgeTransformer, "tensors_of"),
    (blocks.ForgeResBlock, "bind"),
    (blocks.ForgeResBlock, "tensors_of"),
    (blocks.ForgeVaeAttention, "bind"),
    (blocks.ForgeVaeAttention, "eager_reason"),
    (GraphCheck, "_judge"),
]
LATER = [
    (blocks.ForgeTransformer, "bind"),
    (blocks.ForgeTransformer, "output_of"),
    (blocks.ForgeVaeAttention, "output_of"),
    (BlockWeights, "read"),
    (BlockWeights, "for_graph"),
    (BlockTextKv, "graph_call"),
]


@pytest.mark.parametrize(("cls", "name"), AT_FIRST, ids=ids(AT_FIRST))
def test_a_fault_from_the_first_call_on(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    draw: Draw,
    monkeypatch: pytest.MonkeyPatch,
    cls: type,
    name: str,
) -> None:
    expected = host.draw(), host.decode()
    monkeypatch.setattr(cls, name, broken)
    for _ in range(3):
        torch.testing.assert_close(draw(), expected, atol=1e-5, rtol=1e-4)
    assert "'planted'" in " ".join(graphs.status().reasons)


@pytest.mark.parametrize(("cls", "name"), LATER, ids=ids(LATER))
def test_a_fault_while_graphs_serve(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    draw: Draw,
    monkeypatch: pytest.MonkeyPatch,
    cls: type,
    name: str,
) -> None:
    expected = host.draw(), host.decode()
    for _ in range(2):
        draw()
    with monkeypatch.context() as planted:
        planted.setattr(cls, name, broken)
        torch.testing.assert_close(draw(), expected, atol=1e-5, rtol=1e-4)
        assert "'planted'" in " ".join(graphs.status().reasons)
    torch.testing.assert_close(draw(), expected, atol=1e-5, rtol=1e-4)
    assert graphs.status().running == "compiled"

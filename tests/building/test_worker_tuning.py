"""A worker builds a graph again with more effort, and measures it beside the stored one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from onediff_ext.backends.eager import EagerBackend
from onediff_ext.building.worker import speed
from onediff_ext.building.worker.program import _answer
from onediff_ext.engine.export import exporter
from onediff_ext.hosts.diffusers.compile import compile_pipe
from tests.support.session_fixtures import SmallUNet

STORED_S, TUNED_S = 0.005, 0.002


class Clock:
    """The time of this test: only calls of graphs take any."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Graphs:
    """What the backend "eager" makes of its graphs in a test; a tuned one ends with a space.

    Args:
        clock: Told how long a call takes.
        error: Added to the outputs of the tuned graph.

    Attributes:
        shapes: Of the arguments of all calls, as the tuned graph took them.
    """

    def __init__(self, clock: Clock, error: float) -> None:
        self.clock, self.error = clock, error
        self.shapes: list[list[tuple[int, ...]]] = []

    def load(self, own: Any, payload: bytes) -> Any:
        graph = own(payload.rstrip(b" "))
        is_tuned = payload.endswith(b" ")

        def run(arguments: Any) -> Any:
            self.clock.now += TUNED_S if is_tuned else STORED_S
            if is_tuned:
                self.shapes.append([tuple(argument.shape) for argument in arguments])
                return [output + self.error for output in graph(arguments)]
            return graph(arguments)

        return run


@pytest.fixture
def exports() -> None:
    """Programs are exported here and not kept: they are compiled for this test's sizes."""


@pytest.fixture
def tune(open_session, tmp_path: Path, monkeypatch):
    """Tunes the graph of a small UNet's first kind; returns the answer, the graph's bytes and
    the graphs."""
    # The sizes that graphs are compiled for are 32x40 cells here.
    monkeypatch.setattr(exporter, "_HINT_ELEMENTS", 64 * 1024)
    session = open_session(build="never")
    small = SmallUNet(widths=(64, 64), heads=1)
    compile_pipe(small.pipe, session=session)
    small()
    kind = session.kinds[0]
    program = kind.export()

    def run(error: float = 0.0):
        clock, load = Clock(), EagerBackend.load
        graphs = Graphs(clock, error)
        with monkeypatch.context() as patch:
            patch.setattr(speed, "time", clock)
            patch.setattr(EagerBackend, "build_tuned", lambda self, program, device: stored + b" ")
            patch.setattr(
                EagerBackend,
                "load",
                lambda self, payload, device: graphs.load(
                    lambda own: load(self, own, device), payload
                ),
            )
            answer = _answer(
                {
                    "task": "tune",
                    "program": str(tmp_path / "program.pt2"),
                    "graph": str(graph),
                    "backend": "eager",
                    "device": "cpu",
                }
            )
        return answer, graph.read_bytes(), graphs

    stored, graph = program, tmp_path / "graph.bin"
    (tmp_path / "program.pt2").write_bytes(program)
    graph.write_bytes(stored)
    return run


def test_both_are_measured_at_two_sizes(tune):
    answer, payload, graphs = tune()
    assert "error" not in answer
    assert payload.endswith(b" ")
    assert answer["before_ms"] == pytest.approx([1e3 * STORED_S] * 2)
    assert answer["after_ms"] == pytest.approx([1e3 * TUNED_S] * 2)
    images = Counter(shape for shapes in graphs.shapes for shape in shapes if shape[0] == 2)
    measured = {shape for shape, calls in images.items() if len(shape) == 4 and calls > 9}
    assert measured == {(2, 64, 32, 40), (2, 64, 16, 20)}


def test_one_that_is_wrong_is_not_measured(tune):
    answer, payload, graphs = tune(error=1.0)
    assert answer["blame"] == "graph"
    assert not payload.endswith(b" ")
    assert len(graphs.shapes) == 1

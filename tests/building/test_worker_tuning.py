"""A worker builds a graph again with more effort, and measures it beside the stored one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from onediff_ext.backends.eager import EagerBackend
from onediff_ext.building.worker.program import _answer
from onediff_ext.hosts.diffusers.compile import compile_pipe
from tests.support.session_fixtures import SmallUNet

SLOWER_S = 0.003


class Graphs:
    """What the backend "eager" makes of its graphs in a test; a tuned one ends with a space.

    Args:
        slower_s: How much longer a call of the stored graph takes.
        error: Added to the outputs of the tuned graph.

    Attributes:
        shapes: Of the arguments of all calls, as the tuned graph took them.
    """

    def __init__(self, slower_s: float, error: float) -> None:
        self.slower_s, self.error = slower_s, error
        self.shapes: list[list[tuple[int, ...]]] = []

    def load(self, own: Any, payload: bytes) -> Any:
        graph = own(payload.rstrip(b" "))
        is_tuned = payload.endswith(b" ")

        def run(arguments: Any) -> Any:
            if is_tuned:
                self.shapes.append([tuple(argument.shape) for argument in arguments])
                return [output + self.error for output in graph(arguments)]
            time.sleep(self.slower_s)
            return graph(arguments)

        return run


@pytest.fixture
def tune(open_session, tmp_path: Path, monkeypatch):
    """Tunes the graph of a small UNet's first kind; returns the answer, the graph's bytes, the
    graphs and the kind."""
    session = open_session(build="never")
    small = SmallUNet(widths=(64, 64), heads=1)
    compile_pipe(small.pipe, session=session)
    small()
    kind = session.kinds[0]
    program = kind.export()

    def run(slower_s: float = SLOWER_S, error: float = 0.0, shapes: Any = None):
        graphs, load = Graphs(slower_s, error), EagerBackend.load
        with monkeypatch.context() as patch:
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
                    "shapes": json.dumps(kind.shapes if shapes is None else shapes),
                }
            )
        return answer, graph.read_bytes(), graphs, kind

    stored, graph = program, tmp_path / "graph.bin"
    (tmp_path / "program.pt2").write_bytes(program)
    graph.write_bytes(stored)
    return run


def test_both_are_measured_at_the_size_of_the_first_call(tune):
    answer, payload, graphs, kind = tune()
    assert "error" not in answer
    assert payload.endswith(b" ")
    assert float(answer["before_ms"]) - float(answer["after_ms"]) > 0.5 * 1e3 * SLOWER_S
    assert kind.shapes[0][2:] == (16, 16)
    measured = [shapes for shapes in graphs.shapes if shapes[-len(kind.shapes) :] == kind.shapes]
    assert len(measured) > 9


def test_one_that_is_wrong_is_not_measured(tune):
    answer, payload, graphs, _ = tune(error=1.0)
    assert answer["blame"] == "graph"
    assert not payload.endswith(b" ")
    assert len(graphs.shapes) == 1


def test_shapes_of_another_kind_are_an_error(tune):
    answer, payload, _, _ = tune(shapes=[[2, 3]])
    assert "takes no input of shape (2, 3)" in str(answer["error"])
    assert not payload.endswith(b" ")

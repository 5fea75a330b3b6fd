"""The history of builds: each backend has its own times, and files of 0.2.0 are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.machine import machine_digest
from onediff_ext.session.stored_status import stored_status
from onediff_ext.store import BuildHistory, CheckpointRecords, GraphLibrary

MACHINE = "m" * 64


@pytest.fixture
def history(tmp_path: Path) -> BuildHistory:
    return BuildHistory(GraphLibrary(tmp_path, 10**6).folder)


def test_each_backend_has_its_own_build_times(history: BuildHistory) -> None:
    """OneFlow builds a graph in a second, Inductor in twenty: the panel mixed the two."""
    history.record_build(MACHINE, "inductor", "One 8", 20.0)
    assert history.build_seconds(MACHINE, "oneflow", ["One 8", "Two"]) == [None, None]
    history.record_build(MACHINE, "oneflow", "One 8", 1.0)
    for _ in range(5):
        history.record_build(MACHINE, "inductor", "One 8", 22.0)
    assert history.build_seconds(MACHINE, "oneflow", ["One 8", "Two"]) == [1.0, 1.0]
    assert history.build_seconds(MACHINE, "inductor", ["One 8"]) == [22.0]


def test_each_backend_has_its_own_steps(history: BuildHistory) -> None:
    for backend, compiled_ms in (("inductor", 5.0), ("oneflow", 4.0), ("oneflow", 2.0)):
        history.record_step(
            checkpoint="c",
            machine=MACHINE,
            backend=backend,
            size="512x512",
            eager_ms=10.0,
            compiled_ms=compiled_ms,
        )
    assert [s.compiled_ms for s in history.steps(MACHINE, "c", "oneflow")] == [2.0]
    assert [s.compiled_ms for s in history.steps(MACHINE, "c", "inductor")] == [5.0]
    assert len(history.steps(MACHINE)) == 2


def test_a_file_of_0_2_0_is_read_and_reads_what_comes_after_it(history: BuildHistory) -> None:
    step = {
        "checkpoint": "c",
        "machine": MACHINE,
        "size": "512x512",
        "eager_ms": 9.0,
        "compiled_ms": 3.0,
        "at": 1.0,
    }
    old = {"schema": 1, "builds": {MACHINE: {"One 8": [20.0]}}, "steps": [step]}
    path = history.folder.home / "history.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(old), encoding="ascii")
    assert history.build_seconds(MACHINE, "inductor", ["One 8"]) == [20.0]
    assert history.build_seconds(MACHINE, "oneflow", ["One 8"]) == [None]
    assert [s.eager_ms for s in history.steps(MACHINE, "c", "inductor")] == [9.0]
    history.record_build(MACHINE, "oneflow", "One 8", 1.0)
    assert history.build_seconds(MACHINE, "inductor", ["One 8"]) == [20.0]
    assert history.build_seconds(MACHINE, "oneflow", ["One 8"]) == [1.0]
    written = json.loads(path.read_text(encoding="ascii"))
    assert written["schema"] == 1
    assert written["builds"] == old["builds"]
    assert written["steps"][0].items() >= step.items()


def test_the_command_line_shows_the_backend_that_was_measured_last(history: BuildHistory) -> None:
    """`doctor` said "not measured" to a user of OneFlow."""
    device = torch.device("cpu")
    records, library = CheckpointRecords(history.folder), GraphLibrary(history.folder.root, 10**6)
    records.record("c" * 64, name="model", path="/m", architecture="sd1", kinds={})
    (listing,) = records.list()
    for backend, compiled_ms in (("inductor", 5.0), ("oneflow", 2.0)):
        history.record_step(
            checkpoint="c" * 64,
            machine=machine_digest(device),
            backend=backend,
            size="512x512",
            eager_ms=10.0,
            compiled_ms=compiled_ms,
        )
        status = stored_status(library, listing.record, device, CompileOptions())
        assert status.speedup == pytest.approx(10.0 / compiled_ms)

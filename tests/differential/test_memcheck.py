"""The sequence for compute-sanitizer: on a CPU with narrow models, and for real on a GPU."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from onediff_ext.engine.cuda_graphs.captured_forward import CapturedForward
from tests.differential.memcheck import (
    SEQUENCE,
    WORLD,
    errors_in,
    main,
    reports_in,
    run_for,
    scenario_in,
)
from tests.differential.moved_weights import NothingToFindError, read_moved_weights
from tests.differential.sequences import Driver, Step
from tests.support.systems import needs_signals

ERROR = """========= Invalid __global__ read of size 2 bytes
=========     at triton_poi_fused_0+0x1b0
"""


def steps_of(text: str) -> list[Step]:
    return [Step.parse(each) for each in text.split()]


def test_the_sequence_draws_right_pictures_and_leaves_nothing_out() -> None:
    driver = Driver(model="sd15")
    assert driver.run(WORLD, steps_of(SEQUENCE)) is None
    assert driver.counts.steps == len(SEQUENCE.split())
    assert driver.counts.replays > 2 * driver.counts.steps


@pytest.mark.parametrize("planted", [True, False])
def test_the_known_fault_reads_freed_memory(planted: bool) -> None:
    with Driver(model="sd15")._world(WORLD) as (world, _):
        seen = read_moved_weights(world, planted=planted)
        assert bool(world.freed) == planted
    assert seen.replays_before > 0
    assert bool(seen.replays_after) == planted
    assert bool(torch.as_tensor(seen.drawn).isnan().any()) == planted


def test_the_known_fault_is_refused_where_nothing_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CapturedForward, "_record", lambda *args: None)
    nothing = pytest.raises(NothingToFindError, match="before the weights move")
    with Driver(model="sd15")._world(WORLD) as (world, _), nothing:
        read_moved_weights(world)


def test_what_the_known_fault_has_seen_is_read() -> None:
    assert scenario_in(
        "replays_before=3 given_back_bytes=7 replays_after=2 last_picture=drawn"
    ) == {
        "replays_before": 3,
        "given_back_bytes": 7,
        "replays_after": 2,
    }
    assert scenario_in("NothingToFindError: before the weights move: 0 replays") == {}


def test_the_sanitizers_output_is_read() -> None:
    assert errors_in("========= ERROR SUMMARY: 12 errors\n") == 12
    assert errors_in("Segmentation fault") is None
    assert reports_in(f"{ERROR}{ERROR}========= COMPUTE-SANITIZER\n") == 2


@needs_signals
def test_errors_and_steps_are_counted_where_time_runs_out() -> None:
    text = f"{ERROR}    1.5 s size:1\n"
    code = f"import time; print({text!r}, flush=True); time.sleep(60)"
    report = run_for(2.0, [sys.executable, "-c", code])
    assert (report["errors"], report["steps"]) == (1, 1)
    assert report["exit_status"] != 0
    assert not report["has_summary"]


@needs_signals
def test_a_report_is_written_for_a_sequence_that_did_not_end(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    given = ["--store", str(tmp_path), "--device", "cpu", "--model", "sd15", "--fill"]
    assert main([*given, "--seconds", "1", "--json", str(report)]) == 1
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["errors"], found["steps"], found["right"]) == (0, 0, False)


@pytest.mark.gpu
@pytest.mark.timeout(1300)
def test_memcheck_finds_nothing_but_the_known_fault(tmp_path: Path) -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed (it comes with CUDA's toolkit)")
    given = ["--store", str(tmp_path)]
    for more in (["--fill"], [], ["--planted"]):
        assert main([*given, *more]) == 0

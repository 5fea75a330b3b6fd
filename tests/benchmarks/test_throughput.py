"""`benchmarks.throughput` counts the pictures of plain calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import throughput
from tests.support.models import sd15
from tests.support.quick_builds import quick_builds, quick_loads


def test_rows_of_each_batch_have_eager_s_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "throughput.json"
    command = [
        "throughput", "--model", "tiny", "--size", "64x64", "--steps", "1", "--seconds", "0.01",
        "--backend", "eager", "--contenders", "eager,plain", "--json", str(result),
        "--store", str(tmp_path / "store"),
    ]  # fmt: skip
    # Its kinds are exported by other tests, too.
    monkeypatch.setattr(throughput, "make_pipeline", lambda *_: sd15(seed=3))
    for batches in ("1,2", "2"):  # the second run replaces rows
        monkeypatch.setattr(sys, "argv", [*command, "--batches", batches])
        with quick_builds(), quick_loads():
            assert throughput.main() == 0
    rows = json.loads(result.read_text())["rows"]
    assert [(row["contender"], row["batch"]) for row in rows] == [
        *(("eager", 1), ("eager", 2), ("plain", 1), ("plain", 2)),
    ]
    for row in rows:
        assert row["pictures"] % row["batch"] == 0
        # Seconds have two digits, which are few for a picture of 16 ms.
        seconds = row["pictures"] / row["pictures_per_s"]
        assert row["seconds"] == pytest.approx(seconds, abs=0.006)
        assert row["error_vs_eager"] < 1e-4
        assert (row["error_vs_eager"] == 0) == (row["contender"] == "eager")


def test_flux_is_drawn_with_its_own_guidance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "throughput.json"
    command = [
        "throughput", "--model", "small-flux", "--size", "64x64", "--steps", "2",
        "--seconds", "0.01", "--backend", "eager", "--contenders", "eager,plain",
        "--batches", "1", "--json", str(result), "--store", str(tmp_path / "store"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    with quick_builds(), quick_loads():
        assert throughput.main() == 0
    figures = json.loads(result.read_text())
    assert figures["guidance"] == 3.5
    eager, plain = figures["rows"]
    assert eager["error_vs_eager"] == 0
    assert 0 < plain["error_vs_eager"] < 1e-4

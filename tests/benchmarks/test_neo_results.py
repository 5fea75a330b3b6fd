"""What docs/hosts-neo.md claims of Neo's Torch Compile beside OneDiff, of the result files."""

from __future__ import annotations

import pytest

from benchmarks.results import read_result
from benchmarks.tables import RESULTS


@pytest.mark.parametrize(
    ("run", "preset", "events"),
    [("sd15", "reduce-overhead", 5), ("sd15-max-autotune", "max-autotune", 2)],
)
def test_ahead_of_torch_compile_in_each_row(run: str, preset: str, events: int) -> None:
    figures = read_result(RESULTS / f"neo-compile-{run}-h200.json")
    assert figures is not None
    rows = {
        name: {
            (row["event"], row["width"], row["height"]): row
            for row in figures["rows"]
            if row["contender"] == name and "stopped" not in row
        }
        for name in ("ours", preset)
    }
    assert len(rows[preset]) == events
    for event, theirs in rows[preset].items():
        ours = rows["ours"][event]
        for seconds in ("first_s", "seconds"):
            assert ours[seconds] < theirs[seconds], event
        assert "ms_step" not in theirs or ours["ms_step"] < theirs["ms_step"]

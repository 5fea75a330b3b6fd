"""Two nodes in this machine, a killed worker, a lost node and one that joins."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="the extra cluster is not installed")

from benchmarks.cluster_faults import run_with_faults


def test_nothing_is_lost_and_pictures_are_those_of_one_worker() -> None:
    result = run_with_faults(nodes=2, pictures=12, sizes=3, kills=1)
    assert result["killed"] == result["nodes_lost"] == result["nodes_joined"] == 1, result
    assert result["pictures_written"] == 12, result
    assert result["lost"] == result["duplicates"] == 0, result
    assert result["equal_to_one_worker"], result
    assert result["builds_of_each_kind"] == 1, result
    assert result["processes_left"] == 0, result

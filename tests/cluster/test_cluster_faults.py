"""Two nodes in this machine, a killed worker, a lost node and one that joins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("ray", reason="the extra cluster is not installed")

from benchmarks.cluster_faults import run_with_faults
from onediff_ext.store import GraphLibrary

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)


def test_nothing_is_lost_and_pictures_are_those_of_one_worker(
    command_line: CommandLine, tmp_path: Path
) -> None:
    filled = tmp_path / "filled"
    shutil.copytree(command_line.store, filled)
    # One graph is left to build: the first block kind of the UNet that the store names.
    [missing, *_] = [g for g in GraphLibrary(filled, 1 << 30).entries() if "Resnet" in g.label]
    missing.path.unlink()
    result = run_with_faults(
        nodes=2, pictures=12, sizes=3, kills=1, model=command_line.checkpoint(), filled=filled
    )
    assert result["killed"] == result["nodes_lost"] == result["nodes_joined"] == 1, result
    assert result["pictures_written"] == 12, result
    assert result["lost"] == result["duplicates"] == 0, result
    assert result["equal_to_one_worker"], result
    assert result["builds_of_each_kind"] == 1, result
    assert result["processes_left"] == 0, result

"""A node joins a cluster whose graphs are built: it fetches them and draws compiled at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("ray", reason="the extra cluster is not installed")

from benchmarks.cluster_late_node import join_late

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)


def test_a_late_node_is_compiled_soon_after_its_model(command_line: CommandLine) -> None:
    result = join_late(command_line.checkpoint(), command_line.store)
    assert result["first"]["built"] == result["late"]["built"] == 0, result
    assert result["late"]["loaded"] == result["kinds"] > 0, result
    assert result["compiled_after_model_s"] <= 5.0, result

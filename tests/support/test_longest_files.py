"""Runs in several processes begin with the longest files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.longest_files import SECONDS, longest_first

TESTS = Path(__file__).resolve().parents[1]


def test_each_file_exists() -> None:
    assert [name for name in SECONDS if not (TESTS / name).is_file()] == []


def test_other_tests_and_those_of_one_file_keep_their_order() -> None:
    longest, second = list(SECONDS)[:2]
    names = [f"tests/{each}::test" for each in ("b.py", second, "a.py")]
    names += [f"tests/{longest}::test_{each}" for each in "ba"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    found = [item.nodeid for item in longest_first(items)]
    assert found == [names[3], names[4], names[1], names[0], names[2]]

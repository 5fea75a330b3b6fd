"""What each WebUI's last picture was drawn with, in the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onediff_ext.store import GraphLibrary
from onediff_ext.store.last_use import LAST_USE_FILE, WebUIUse, WebUIUses

USE = WebUIUse({"vae": "compile", "captures": True}, "ab" * 32, "fox", "/fox", "sd1", "cuda:0")


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    return GraphLibrary(tmp_path, 10**9)


def test_each_host_has_its_own(library: GraphLibrary) -> None:
    uses = WebUIUses(library.folder)
    assert uses.of("forge") is None
    uses.note("forge", USE)
    other = replace(USE, choices={}, device="cuda:1")
    uses.note("neo", other)
    assert (uses.of("forge"), uses.of("neo"), uses.of("a1111")) == (USE, other, None)


def test_a_use_is_forgotten(library: GraphLibrary) -> None:
    uses = WebUIUses(library.folder)
    uses.note("forge", USE)
    uses.note("neo", USE)
    uses.forget("forge")
    uses.forget("a1111")
    assert (uses.of("forge"), uses.of("neo")) == (None, USE)


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.update(schema=2),
        lambda record: record["hosts"]["forge"].update(choices=[]),
        lambda record: record["hosts"]["forge"].pop("path"),
        lambda record: record["hosts"]["forge"].update(device=3),
        lambda record: record["hosts"]["forge"].update(content_hash="../fox"),
    ],
)
def test_a_record_that_cannot_be_used_is_none(
    library: GraphLibrary, damage: Callable[[Any], object]
) -> None:
    uses = WebUIUses(library.folder)
    uses.note("forge", USE)
    path = library.folder.home / LAST_USE_FILE
    record = json.loads(path.read_text(encoding="ascii"))
    damage(record)
    path.write_text(json.dumps(record), encoding="ascii")
    assert uses.of("forge") is None
    uses.note("forge", USE)
    assert uses.of("forge") == USE


@pytest.mark.parametrize("value", [None, "2", True, [], -1, 10**400, float("inf"), float("nan")])
def test_a_time_that_is_none_is_not_known(library: GraphLibrary, value: object) -> None:
    uses = WebUIUses(library.folder)
    uses.note("forge", replace(USE, saved_s=0.02, load_s=2.5))
    path = library.folder.home / LAST_USE_FILE
    record = json.loads(path.read_text(encoding="ascii"))
    record["hosts"]["forge"].update(saved_s=value)
    path.write_text(json.dumps(record), encoding="ascii")
    assert uses.of("forge") == replace(USE, load_s=2.5)
    record["hosts"]["forge"].pop("load_s")  # of an earlier version
    path.write_text(json.dumps(record), encoding="ascii")
    assert uses.of("forge") == USE


def test_verify_finds_a_damaged_record(library: GraphLibrary) -> None:
    WebUIUses(library.folder).note("forge", USE)
    path = library.folder.home / LAST_USE_FILE
    path.write_text("{", encoding="ascii")
    assert [problem.path.name for problem in library.verify(repair=True)] == [LAST_USE_FILE]
    assert not path.exists()

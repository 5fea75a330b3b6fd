"""Files that another process has open, which Windows neither replaces nor deletes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.core.errors import StoreError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary, StoredGraph, atomic_write, eviction

KIB = 1 << 10


class Windows(SimpleNamespace):
    """`os` as a module of the store sees it, with files in use.

    Args:
        refusals: How often a file is refused.
    """

    def __init__(self, refusals: int) -> None:
        super().__init__(name="nt", refusals=refusals)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def replace(self, source: Path, target: Path) -> None:
        if self.refusals:
            self.refusals -= 1
            raise PermissionError(13, "The process cannot access the file", str(target))
        os.replace(source, target)


def put(library: GraphLibrary, number: int) -> StoredGraph:
    key = KindKey({"block": "ResnetBlock2D", "number": str(number)})
    return library.put(
        key, b"x" * 4 * KIB, backend="fake", label="block", details={}, build_seconds=1.0
    )


def test_a_file_that_is_being_read_is_replaced_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = GraphLibrary(tmp_path, 1 << 20)
    put(library, 1)
    windows = Windows(refusals=3)
    monkeypatch.setattr(atomic_write, "os", windows)
    put(library, 2)
    assert windows.refusals == 0
    assert len(library.entries()) == 2


def test_a_file_that_stays_in_use_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = GraphLibrary(tmp_path, 1 << 20)
    monkeypatch.setattr(atomic_write, "os", Windows(refusals=10**6))
    monkeypatch.setattr(atomic_write, "_REPLACE_WAIT_S", 0.0)
    with pytest.raises(StoreError):
        put(library, 1)
    assert not list(library.folder.tmp.glob("*.part"))
    assert library.entries() == []


def test_a_graph_in_use_stays_and_the_others_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = GraphLibrary(tmp_path, 1 << 20)
    oldest, next_oldest, newest = (put(library, number) for number in range(3))
    for seconds, graph in enumerate((oldest, next_oldest, newest), start=1_000_000):
        os.utime(graph.path, (seconds, seconds))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == oldest.path:
            raise PermissionError(13, "The process cannot access the file", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(eviction, "os", Windows(refusals=0))
    limit_bytes = newest.path.stat().st_size + KIB
    GraphLibrary(tmp_path, limit_bytes).prune()
    assert [graph.path.exists() for graph in (oldest, next_oldest, newest)] == [True, False, True]

"""Files that broke on the disk: never a crash, never wrong bytes, and gone afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary

KEY = KindKey({"class": "ResnetBlock2D"})


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    return GraphLibrary(tmp_path / "store", 1 << 20)


def put(library: GraphLibrary) -> tuple[Path, bytes]:
    graph = library.put(
        KEY, bytes(range(256)), label="L", backend="b", build_seconds=1, details={"a": 1}
    )
    return graph.path, graph.path.read_bytes()


def expect_recovery(library: GraphLibrary, damaged_at: object) -> None:
    assert library.get(KEY) is None, damaged_at
    assert "stored graph was" in library.explain(KEY), damaged_at
    put(library)
    got = library.get(KEY)
    assert got is not None, damaged_at
    assert got.payload == bytes(range(256)), damaged_at


def test_flipped_bytes_anywhere(library: GraphLibrary) -> None:
    chance = random.Random(1)
    path, sound = put(library)
    positions = [*range(60), *(chance.randrange(len(sound)) for _ in range(60)), len(sound) - 1]
    for position in positions:
        position = min(position, len(sound) - 1)  # the length varies with the time's digits
        damaged = bytearray(sound)
        damaged[position] ^= chance.randrange(1, 256)
        path.write_bytes(damaged)
        assert library.get(KEY) is None, position
        # Also with a changed schema number: a header of ours follows it.
        assert not path.exists(), position
        expect_recovery(library, position)
        path, sound = put(library)


def test_truncation_at_every_interesting_length(library: GraphLibrary) -> None:
    path, sound = put(library)
    payload_at = len(sound) - 256
    lengths = [0, 1, 7, 8, 11, 12, 15, 16, 47, 48, 49]
    for length in [*lengths, payload_at - 1, payload_at, payload_at + 1, len(sound) - 1]:
        path.write_bytes(sound[:length])
        expect_recovery(library, length)
        assert not any(problem for problem in library.verify())


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"PK\3\4", b"more"], ids=repr)
def test_rubbish(library: GraphLibrary, content: bytes) -> None:
    path, sound = put(library)
    path.write_bytes(sound + content if content == b"more" else content[:40])
    expect_recovery(library, content)


def test_a_folder_in_a_graphs_place(library: GraphLibrary) -> None:
    path, _ = put(library)
    path.unlink()
    path.mkdir()
    assert library.get(KEY) is None
    assert "no regular file" in library.explain(KEY)
    assert library.entries() == []
    assert [problem.remedy for problem in library.verify(repair=True)] == [""]
    library.prune(limit_bytes=0)


def test_a_file_in_the_stores_place(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    library = GraphLibrary(tmp_path / "store", 1 << 20)
    assert library.get(KEY) is None
    assert library.entries() == []


def test_the_store_is_removed_while_in_use(library: GraphLibrary, tmp_path: Path) -> None:
    put(library)
    library.folder.root.rename(tmp_path / "moved away")
    assert library.get(KEY) is None
    put(library)
    assert library.get(KEY) is not None


def test_damage_that_was_repaired_meanwhile_is_not_deleted(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sound = put(library)
    path.write_bytes(b"damaged")
    prepare = library.folder.prepare

    def prepare_while_another_process_repairs() -> None:
        prepare()
        path.write_bytes(sound)

    monkeypatch.setattr(library.folder, "prepare", prepare_while_another_process_repairs)
    assert library.get(KEY) is None
    assert library.get(KEY) is not None

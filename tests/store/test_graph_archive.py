"""Graph archives between machines, and archives that must not be trusted."""

from __future__ import annotations

import os
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onediff_ext.core.errors import (
    GraphCorruptError,
    OneDiffError,
    OptionError,
    StoreError,
    StoreFullError,
    UntrustedGraphError,
)
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary, UnknownSchemaError
from onediff_ext.store.graph_file import MAGIC

MB = 1 << 20


def key_of(number: int) -> KindKey:
    return KindKey({"number": str(number)})


@pytest.fixture
def source(tmp_path: Path) -> GraphLibrary:
    library = GraphLibrary(tmp_path / "source", MB)
    for i in range(3):
        library.put(
            key_of(i), b"code%d" % i, label="L", backend="fake", build_seconds=2, details={"i": i}
        )
    return library


@pytest.fixture
def target(tmp_path: Path) -> GraphLibrary:
    return GraphLibrary(tmp_path / "target", MB)


@pytest.fixture
def archive(source: GraphLibrary, tmp_path: Path) -> Path:
    path = tmp_path / "graphs.zip"
    assert source.export(path) == 3
    return path


def test_exported_graphs_are_imported(
    source: GraphLibrary, target: GraphLibrary, archive: Path
) -> None:
    report = target.import_archive(archive, trust=True)
    assert set(report.imported) == {key_of(i).digest for i in range(3)}
    assert report.kept == ()
    ours, theirs = source.get(key_of(1)), target.get(key_of(1))
    assert ours is not None
    assert theirs is not None
    assert theirs.payload == ours.payload
    assert theirs.header.origin == "imported"
    assert theirs.header.created_at == ours.header.created_at
    assert theirs.header.details == {"i": 1}
    assert target.verify() == []


def test_archives_are_plain_and_repeatable(source: GraphLibrary, tmp_path: Path) -> None:
    one, two = tmp_path / "1.zip", tmp_path / "2.zip"
    digests = [key_of(2).digest, key_of(0).digest, key_of(2).digest]
    assert source.export(one, digests) == 2
    assert source.export(two, digests) == 2
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as archive:
        assert [i.compress_type for i in archive.infolist()] == [zipfile.ZIP_STORED] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.zip", "2.zip", "source"]


def test_what_is_here_and_sound_stays(target: GraphLibrary, archive: Path) -> None:
    ours = target.put(key_of(0), b"ours", label="L", backend="b", build_seconds=0, details={})
    bad = target.put(key_of(1), b"ours", label="L", backend="b", build_seconds=0, details={})
    bad.path.write_bytes(b"bad")
    report = target.import_archive(archive, trust=True)
    assert report.kept == (ours.digest,)
    assert bad.digest in report.imported
    got = target.get(key_of(0))
    assert got is not None
    assert got.payload == b"ours"


def test_without_trust_nothing_is_taken(target: GraphLibrary, archive: Path) -> None:
    with pytest.raises(UntrustedGraphError) as caught:
        target.import_archive(archive)
    assert "native code" in caught.value.hint
    assert f"graphs import {archive} --trust" in caught.value.hint
    assert not target.folder.root.exists()


def test_a_missing_or_damaged_graph_is_not_exported(source: GraphLibrary, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with pytest.raises(StoreError, match="cannot be read"):
        source.export(path, ["0" * 64])
    with pytest.raises(OptionError):
        source.export(path, ["../../etc/passwd"])
    graph = source.get(key_of(0))
    assert graph is not None
    graph.path.write_bytes(graph.path.read_bytes()[:-1] + b"?")
    with pytest.raises(GraphCorruptError, match="damaged"):
        source.export(path)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_one_bad_graph_and_nothing_is_taken(target: GraphLibrary, archive: Path) -> None:
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(f"{'0' * 64}.graph", b"rubbish")
    with pytest.raises(GraphCorruptError, match="damaged"):
        target.import_archive(archive, trust=True)
    assert not target.folder.root.exists()


@pytest.mark.parametrize(
    "name", ["../evil.graph", f"/{'0' * 64}.graph", f"a/{'0' * 64}.graph", f"{'0' * 64}.graph\n"]
)
def test_names_are_never_paths(target: GraphLibrary, tmp_path: Path, name: str) -> None:
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr(name, b"x")
    with pytest.raises(GraphCorruptError, match="no graph"):
        target.import_archive(path, trust=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evil.zip"]


def test_a_graph_under_another_name_is_refused(
    source: GraphLibrary, target: GraphLibrary, tmp_path: Path
) -> None:
    path = tmp_path / "renamed.zip"
    graph = source.entries()[0]
    with zipfile.ZipFile(path, "w") as opened:
        opened.write(graph.path, f"{'0' * 64}.graph")
    with pytest.raises(GraphCorruptError, match="another kind"):
        target.import_archive(path, trust=True)


def test_packed_doubled_oversized_and_foreign_archives_are_refused(
    source: GraphLibrary, target: GraphLibrary, archive: Path, tmp_path: Path
) -> None:
    graph = source.entries()[0]
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.write(graph.path, graph.path.name)
    with pytest.raises(GraphCorruptError, match="packed"):
        target.import_archive(path, trust=True)
    with zipfile.ZipFile(path, "w") as opened:
        opened.write(graph.path, graph.path.name)
        with pytest.warns(UserWarning, match="Duplicate"):
            opened.write(graph.path, graph.path.name)
    with pytest.raises(GraphCorruptError, match="twice"):
        target.import_archive(path, trust=True)
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr(graph.path.name, MAGIC + b"\7\0\0\0")
    with pytest.raises(UnknownSchemaError, match="schema 7"):
        target.import_archive(path, trust=True)
    with pytest.raises(StoreFullError):
        GraphLibrary(tmp_path / "small", 100).import_archive(archive, trust=True)
    with pytest.raises(StoreError, match="cannot be read"):
        target.import_archive(tmp_path / "absent.zip", trust=True)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(draw=st.data())
def test_a_damaged_archive_never_crashes(
    draw: st.DataObject, archive: Path, tmp_path: Path
) -> None:
    damaged = bytearray(archive.read_bytes())
    for _ in range(draw.draw(st.integers(1, 3))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    path = tmp_path / "damaged.zip"
    path.write_bytes(damaged[: draw.draw(st.integers(0, len(damaged)))])
    library = GraphLibrary(tmp_path / "target", MB)
    with suppress(OneDiffError):
        library.import_archive(path, trust=True)
    assert library.verify() == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes and links in folders")
def test_an_export_takes_the_place_of_files_only(source: GraphLibrary, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "nothing")
    for path in (pipe, link):
        with pytest.raises(StoreError, match="not a file"):
            source.export(path)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert source.export(tmp_path / "a.zip") == source.export(tmp_path / "a.zip")

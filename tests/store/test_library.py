"""The graph library in one process."""

from __future__ import annotations

import logging
import os
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onediff_ext.core.errors import (
    GraphCorruptError,
    OptionError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary, StoredGraph, StoreProblem, default_root
from onediff_ext.store.eviction import Candidate, choose_evictions
from onediff_ext.store.folder import encode_schema
from onediff_ext.store.graph_file import MAGIC

MB = 1 << 20


def key_of(number: int, **entries: str) -> KindKey:
    return KindKey({"block": "ResnetBlock2D", "number": str(number), "torch": "2.13.0", **entries})


def put(
    library: GraphLibrary, key: KindKey, payload: bytes = b"code", **more: object
) -> StoredGraph:
    options: dict[str, object] = {"label": "ResnetBlock2D 320→640", "details": {}, **more}
    return library.put(key, payload, backend="fake", build_seconds=1.0, **options)  # type: ignore[arg-type]


def set_last_use(graph: StoredGraph, seconds: float) -> None:
    os.utime(graph.path, (seconds, seconds))


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    return GraphLibrary(tmp_path / "store", 10 * MB)


def test_reading_creates_nothing(library: GraphLibrary) -> None:
    assert library.get(key_of(1)) is None
    assert library.entries() == []
    assert library.verify(repair=True) == []
    assert library.prune().digests == ()
    assert library.delete("0" * 64) is False
    assert library.explain(key_of(1)) == "nothing stored yet"
    assert not library.folder.root.exists()


def test_a_put_graph_is_got(library: GraphLibrary) -> None:
    stored = put(library, key_of(1), b"\0code", details={"outputs": ("a", 1)})
    got = GraphLibrary(library.folder.root, MB).get(key_of(1))
    assert got is not None
    assert library.read_payload(got) == got.payload == b"\0code"
    assert got.header == stored.header
    assert got.header.details == {"outputs": ["a", 1]}
    assert got.header.origin == "built"
    assert got.key == key_of(1)
    assert got.digest == key_of(1).digest
    assert got.size_bytes == stored.size_bytes == got.path.stat().st_size
    assert library.explain(key_of(1)) == "stored"


def test_a_second_put_replaces_the_first(library: GraphLibrary) -> None:
    put(library, key_of(1), b"old")
    put(library, key_of(1), b"new")
    got = library.get(key_of(1))
    assert got is not None
    assert got.payload == b"new"
    assert len(library.entries()) == 1


def test_listing_has_no_payloads_and_they_can_be_read_later(library: GraphLibrary) -> None:
    set_last_use(put(library, key_of(1), b"one"), 100)
    set_last_use(put(library, key_of(2), b"two"), 200)
    newest, oldest = library.entries()
    assert (newest.key, oldest.key) == (key_of(2), key_of(1))
    assert newest.payload is None
    assert newest.last_used_at == 200
    assert newest.age_s(newest.header.created_at + 5) == 5
    assert newest.age_s(0) == 0
    assert library.read_payload(oldest) == b"one"
    assert library.entries()[0].key == key_of(1), "reading the payload is a use"
    library.delete(oldest.digest)
    with pytest.raises(StoreError, match="any more"):
        library.read_payload(oldest)


def test_folders_and_files_are_private(library: GraphLibrary) -> None:
    if os.name == "nt":
        pytest.skip("Windows has no permission bits; the user's cache folder is private")
    graph = put(library, key_of(1))
    for folder in (library.folder.root, library.folder.graphs, library.folder.tmp):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(graph.path.stat().st_mode) == 0o600


def test_nothing_is_left_besides_the_graphs(library: GraphLibrary) -> None:
    graph = put(library, key_of(1))
    with library.build_lock(key_of(2), 1):
        assert len(list(library.folder.locks.folder.iterdir())) == 2
    root = library.folder.root
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert files <= {f"graphs/{graph.path.name}", "schema.json", "locks/guard.lock"}


def test_a_graph_above_the_limit_is_refused(library: GraphLibrary) -> None:
    put(library, key_of(1))
    library.limit_bytes = 1000
    with pytest.raises(StoreFullError, match="may have") as caught:
        put(library, key_of(2), b"x" * 1000)
    assert "limit" in caught.value.hint
    assert [graph.key for graph in library.entries()] == [key_of(1)]
    with pytest.raises(OptionError):
        GraphLibrary(library.folder.root, 0)


# Damage and other versions


def test_damage_is_removed_logged_once_and_explained(
    library: GraphLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    graph = put(library, key_of(1), b"x" * 100)
    graph.path.write_bytes(graph.path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert library.get(key_of(1)) is None
        assert library.get(key_of(1)) is None
    assert len(caplog.records) == 1
    assert not graph.path.exists()
    explanation = library.explain(key_of(1))
    assert explanation.startswith("the stored graph was damaged (the file has ")
    assert explanation.endswith("; it was removed")
    put(library, key_of(1))
    assert library.explain(key_of(1)) == "stored"


def test_a_renamed_graph_is_not_taken_for_another_kind(library: GraphLibrary) -> None:
    graph = put(library, key_of(1))
    graph.path.rename(graph.path.with_name(f"{key_of(2).digest}.graph"))
    assert library.get(key_of(2)) is None
    assert "another kind" in library.explain(key_of(2))


def test_another_schema_is_a_miss_and_stays(library: GraphLibrary) -> None:
    graph = put(library, key_of(1))
    graph.path.write_bytes(MAGIC + struct.pack("<I", 9) + b"future")
    assert library.get(key_of(1)) is None
    assert "schema 9; this one reads 1" in library.explain(key_of(1))
    assert library.entries() == []
    assert [problem.remedy for problem in library.verify(repair=True)] == [""]
    assert library.prune(limit_bytes=0, older_than_s=0).digests == ()
    assert graph.path.exists()
    assert library.prune(other_versions=True).digests == (graph.digest,)
    assert not graph.path.exists()


def test_a_store_of_another_version_is_left_alone(tmp_path: Path) -> None:
    root, schema = tmp_path / "store", encode_schema(2).decode()
    theirs = put(GraphLibrary(root, MB), key_of(1)).path
    (root / "schema.json").write_text(schema)
    library = GraphLibrary(root, MB)
    assert library.get(key_of(1)) is None
    assert "the store has 1 graph of another version" in library.explain(key_of(1))
    ours = put(library, key_of(1), b"ours").path
    assert ours.parent == root / "schema-1" / "graphs"
    assert library.prune(limit_bytes=0).digests == (key_of(1).digest,)
    assert theirs.exists()
    assert (root / "schema.json").read_text() == schema
    put(library, key_of(1), b"ours")
    library.prune(other_versions=True)
    assert not theirs.exists()
    assert ours.exists()


def test_verify_reports_and_repairs(library: GraphLibrary) -> None:
    sound, bad = put(library, key_of(1)), put(library, key_of(2))
    bad.path.write_bytes(b"")
    problem = StoreProblem(bad.path, "the file does not start like a graph")
    assert library.verify() == [problem]
    assert bad.path.exists()
    assert [found.remedy for found in library.verify(repair=True)] == ["deleted"]
    assert library.verify() == []
    assert [graph.key for graph in library.entries()] == [sound.key]


def test_delete_takes_a_digest_and_nothing_else(library: GraphLibrary) -> None:
    graph = put(library, key_of(1))
    for name in ("../schema", "", graph.digest[:-1], graph.digest.upper(), f"{graph.digest}\n"):
        with pytest.raises(OptionError):
            library.delete(name)
    assert library.delete(graph.digest) is True
    assert library.delete(graph.digest) is False


# Explanations of misses


def test_explain_names_what_differs_from_the_nearest(library: GraphLibrary) -> None:
    put(library, key_of(1), label="near")
    put(library, key_of(1, cuda="13", other="x"), label="far")
    assert library.explain(key_of(1, torch="2.14.0")) == (
        'nearest stored graph "near" differs in torch 2.13.0 → 2.14.0'
    )
    # The same label wins over fewer differences.
    assert '"far" differs in cuda 13 → absent' in library.explain(key_of(1, torch="2"), label="far")


def test_explain_prefers_the_same_class_and_stays_short(library: GraphLibrary) -> None:
    put(library, key_of(1, **{"block": "Other"}), label="other class")
    many = {f"name{i}": "v" * 300 for i in range(9)}
    put(library, key_of(1, **many), label="same class")
    explanation = library.explain(key_of(1))
    assert explanation.startswith('nearest stored graph "same class"')
    assert explanation.endswith("… and 4 more".replace("… ", "…, "))
    assert len(explanation) < 700


# Eviction


def test_put_makes_room_by_least_recent_use(library: GraphLibrary) -> None:
    graphs = [put(library, key_of(i), b"x" * 1000) for i in range(4)]
    for graph, seconds in zip(graphs, (300, 100, 200, 400), strict=True):
        set_last_use(graph, seconds)
    other = GraphLibrary(library.folder.root, int(graphs[0].size_bytes * 3.5))
    put(other, key_of(9), b"x" * 1000)
    left = {graph.key for graph in other.entries()}
    assert left == {key_of(0), key_of(3), key_of(9)}


def test_a_get_is_a_use(library: GraphLibrary) -> None:
    graphs = [put(library, key_of(i), b"x" * 1000) for i in range(3)]
    for i, graph in enumerate(graphs):
        set_last_use(graph, 100 + i)
    other = GraphLibrary(library.folder.root, 10 * MB)
    assert other.get(key_of(0)) is not None
    report = GraphLibrary(library.folder.root, MB).prune(limit_bytes=graphs[0].size_bytes)
    assert report.digests == (key_of(1).digest, key_of(2).digest)
    assert report.freed_bytes == graphs[1].size_bytes + graphs[2].size_bytes
    assert report.kept_bytes == graphs[0].size_bytes


def test_what_this_process_used_goes_last(library: GraphLibrary) -> None:
    root = library.folder.root
    graphs = [put(GraphLibrary(root, MB), key_of(i), b"x" * 1000) for i in range(3)]
    assert library.get(key_of(0)) is not None
    set_last_use(graphs[0], 100)
    assert library.prune(limit_bytes=graphs[0].size_bytes).digests == (
        key_of(1).digest,
        key_of(2).digest,
    )
    assert library.prune(older_than_s=0).digests == ()
    assert library.prune(limit_bytes=0).digests == (key_of(0).digest,)


def test_prune_by_age(library: GraphLibrary) -> None:
    old, new = put(library, key_of(1)), put(library, key_of(2))
    set_last_use(old, time.time() - 3600)
    other = GraphLibrary(library.folder.root, MB)
    assert other.prune(older_than_s=7200).digests == ()
    assert other.prune(older_than_s=1800).digests == (old.digest,)
    assert new.path.exists()


def test_what_is_used_while_pruning_stays(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = put(library, key_of(1))

    def choose(candidates: list[Candidate], **options: object) -> list[Candidate]:
        set_last_use(graph, time.time() + 5)  # another process, in between
        return choose_evictions(candidates, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("onediff_ext.store.eviction.choose_evictions", choose)
    assert GraphLibrary(library.folder.root, MB).prune(limit_bytes=0).digests == ()
    assert graph.path.exists()


def test_damaged_files_count_and_can_be_evicted(library: GraphLibrary) -> None:
    graph = put(library, key_of(1))
    graph.path.write_bytes(b"rubbish")
    assert GraphLibrary(library.folder.root, MB).prune(limit_bytes=0).digests == (graph.digest,)


# Archives are in test_graph_archive.py.


def test_the_limits_for_speed(library: GraphLibrary) -> None:
    """20 graphs of 1 MB in 0.2 s, and a listing that reads headers only."""
    payload = os.urandom(MB)
    library.limit_bytes = 100 * MB
    for i in range(20):
        put(library, key_of(i), payload)
    started = time.perf_counter()
    for i in range(20):
        assert library.get(key_of(i)) is not None
    reading_s = time.perf_counter() - started
    started = time.perf_counter()
    assert len(library.entries()) == 20
    listing_s = time.perf_counter() - started
    assert reading_s < 0.4, "0.02 s when measured; twice the limit for a busy machine"
    assert listing_s < 0.1


def test_importing_the_store_is_light() -> None:
    script = (
        "import sys, onediff_ext.store; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({"ONEDIFF_STORE": "/s"}, "linux", "/s"),
        ({"ONEDIFF_STORE": "", "XDG_CACHE_HOME": "/c"}, "linux", "/c/onediff-ext"),
        ({"XDG_CACHE_HOME": "relative"}, "linux", "/home/u/.cache/onediff-ext"),
        ({}, "linux", "/home/u/.cache/onediff-ext"),
        ({}, "darwin", "/home/u/Library/Caches/onediff-ext"),
        ({"LOCALAPPDATA": "/local"}, "win32", "/local/onediff-ext"),
        ({}, "win32", "/home/u/AppData/Local/onediff-ext"),
    ],
)
def test_default_root(environ: dict[str, str], platform: str, expected: str) -> None:
    assert default_root(environ, platform, Path("/home/u")) == Path(expected)


def test_errors_are_store_errors() -> None:
    for error in (StoreFullError, StoreReadOnlyError, GraphCorruptError):
        assert issubclass(error, StoreError)

"""Untrusted files in the store: pipes, devices, wrong types, flipped bits, false claims."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from onediff_ext.cli import graphs as graphs_command
from onediff_ext.cli.main import main
from onediff_ext.core.errors import CheckpointError, GraphCorruptError, StoreError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.words import day_of, printable
from onediff_ext.store import (
    BuildHistory,
    BuildRecords,
    CheckpointRecords,
    ContentHashes,
    GraphLibrary,
    StoredGraph,
)
from onediff_ext.store.folder import encode_schema

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
MB = 1 << 20
KEY = KindKey({"class": "ResnetBlock2D"})


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    return GraphLibrary(tmp_path / "store", MB)


def put(library: GraphLibrary, label: str = "L", key: KindKey = KEY) -> StoredGraph:
    return library.put(key, b"code", label=label, backend="b", build_seconds=1, details={})


def make(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "endless device":
        path.symlink_to("/dev/zero")
    elif what == "loop of links":
        path.symlink_to(path.name)
    else:
        path.mkdir()


WHATS = ("fifo", "endless device", "loop of links", "folder")


@posix
@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", WHATS)
def test_no_file_of_another_kind_holds_the_store_up(library: GraphLibrary, what: str) -> None:
    graph, sound = put(library), put(library, key=KindKey({"a": "b"}))
    make(graph.path, what)
    assert [found.digest for found in library.entries()] == [sound.digest]
    assert library.get(KEY) is None
    make(graph.path, what) if not os.path.lexists(graph.path) else None
    assert [problem.path for problem in library.verify()] == [graph.path]
    library.prune(limit_bytes=MB, other_versions=True)
    with pytest.raises(StoreError):
        library.export(library.folder.root / "all.zip", [graph.digest])
    library.verify(repair=True)
    assert os.path.lexists(graph.path) == (what == "folder")
    assert library.get(sound.key) is not None
    assert library.export(library.folder.root / "all.zip") == 1


@posix
@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", WHATS)
def test_no_record_of_another_kind_holds_the_store_up(library: GraphLibrary, what: str) -> None:
    put(library)
    build_records, records = BuildRecords(library.folder), CheckpointRecords(library.folder)
    history = BuildHistory(library.folder)
    build_records.record_load_check(KEY.digest, "L", machine="m", payload_sha256="0" * 64)
    history.record_build("m", "inductor", "L", 1.0)
    records.record("0" * 64, name="n", path="p", architecture="a", kinds={})
    names = [
        library.folder.build_records / f"{KEY.digest}.json",
        library.folder.checkpoints / f"{'0' * 64}.json",
        library.folder.home / "history.json",
        library.folder.home / "content-hashes.json",
        library.folder.root / "schema.json",
        library.folder.tmp / "1-2.part",
    ]
    for path in names:
        make(path, what)
    other = GraphLibrary(library.folder.root, MB)
    assert other.get(KEY) is not None
    assert build_records.read(KEY.digest).load_checks == {}
    assert list(build_records.failures()) == []
    assert records.list() == []
    assert history.build_seconds("m", "inductor", ["L"]) == [None]
    assert {problem.path for problem in other.verify()} == {*names[:5]}
    other.entries()
    if what == "folder":
        return  # which nothing replaces
    other.prune(other_versions=True)
    other.verify(repair=True)
    assert other.verify() == []
    assert other.get(KEY) is not None


@posix
@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", WHATS)
def test_archives_and_checkpoints_of_another_kind_are_refused(
    library: GraphLibrary, tmp_path: Path, what: str
) -> None:
    make(tmp_path / "file", what)
    with pytest.raises(StoreError):
        library.import_archive(tmp_path / "file", trust=True)
    with pytest.raises(CheckpointError):
        ContentHashes(library.folder).content_hash(tmp_path / "file")


def test_an_archive_with_a_graph_of_no_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onediff_ext.store.graph_archive.MAX_GRAPH_BYTES", 100)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("0" * 64 + ".graph", b"x" * 101)
    with pytest.raises(GraphCorruptError, match="size"):
        GraphLibrary(tmp_path / "s", MB).import_archive(tmp_path / "a.zip", trust=True)


@pytest.mark.parametrize("old_form", [True, False])
def test_no_flipped_bit_of_the_schema_costs_more_than_the_file(
    tmp_path: Path, old_form: bool
) -> None:
    root = tmp_path / "store"
    graph = put(GraphLibrary(root, MB))
    sound = b'{"schema": 1}' if old_form else (root / "schema.json").read_bytes()
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        (root / "schema.json").write_bytes(damaged)
        library = GraphLibrary(root, MB)
        assert library.get(KEY) is not None, damaged
        assert library.folder.home == root
        library.prune(other_versions=True)
        assert graph.path.exists(), damaged
        if json_is_equal(damaged, sound):
            continue
        (root / "schema.json").write_bytes(damaged)
        library = GraphLibrary(root, MB)
        assert [problem.path.name for problem in library.verify()] == ["schema.json"], damaged
        library.verify(repair=True)
        assert (root / "schema.json").read_bytes() == encode_schema(1)
        assert GraphLibrary(root, MB).verify() == []


def json_is_equal(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_a_damaged_schema_of_another_version_stays_theirs(tmp_path: Path) -> None:
    root = tmp_path / "store"
    theirs = put(GraphLibrary(root, MB)).path
    theirs.write_bytes(theirs.read_bytes()[:8] + (9).to_bytes(4, "little") + b"whatever follows")
    (root / "schema.json").write_bytes(b"damaged")
    library = GraphLibrary(root, MB)
    ours = put(library).path
    assert ours.parent == root / "schema-1" / "graphs"
    assert theirs.exists()
    assert (root / "schema.json").read_bytes() == b"damaged"
    assert GraphLibrary(root, MB).get(KEY) is not None


def test_graphs_of_a_store_that_a_flipped_bit_had_split_come_together_again(tmp_path: Path) -> None:
    root, apart, other_key = tmp_path / "store", tmp_path / "apart", KindKey({"class": "Other"})
    put(GraphLibrary(root, MB))
    put(GraphLibrary(apart, MB), label="its twin")
    moved = put(GraphLibrary(apart, MB), key=other_key).path
    damaged = moved.with_name("0" * 64 + ".graph")
    damaged.write_bytes(b"no graph")
    apart.rename(root / "schema-1")  # where earlier versions went on
    (root / "schema.json").write_bytes(b'{"schema": 3}')
    library = GraphLibrary(root, MB)
    assert library.get(other_key) is None
    found = {problem.path: problem for problem in library.verify()}
    assert [problem.state for problem in found.values()].count("misplaced") == 3
    assert moved.name in {path.name for path in found}
    remedies = {p.path.name: p.remedy for p in GraphLibrary(root, MB).verify(repair=True)}
    assert remedies == {
        "schema.json": "written again",
        moved.name: "moved back",
        damaged.name: "deleted",
        f"{KEY.digest}.graph": "deleted",  # the root's own stays
    }
    assert not (root / "schema-1").exists()
    library = GraphLibrary(root, MB)
    assert library.verify() == []
    kept, back = library.get(KEY), library.get(other_key)
    assert kept is not None
    assert back is not None
    assert (kept.label, back.label) == ("L", "L")


def test_what_lies_apart_beside_another_versions_store_stays_there(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    (root / "schema.json").write_bytes(encode_schema(9))
    path = put(GraphLibrary(root, MB)).path
    assert path.parent == root / "schema-1" / "graphs"
    assert GraphLibrary(root, MB).verify(repair=True) == []
    assert path.exists()


def test_a_lost_or_damaged_schema_is_written_again_with_the_next_graph(tmp_path: Path) -> None:
    root = tmp_path / "store"
    put(GraphLibrary(root, MB))
    (root / "schema.json").write_bytes(b"")
    put(GraphLibrary(root, MB))
    assert (root / "schema.json").read_bytes() == encode_schema(1)


def test_a_flipped_schema_number_of_a_graph_is_damage(library: GraphLibrary) -> None:
    graph = put(library)
    sound = graph.path.read_bytes()
    for bit in range(8 * 8, 12 * 8):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        graph.path.write_bytes(damaged)
        (problem,) = library.verify()
        assert problem.state == "damaged"
        assert library.get(KEY) is None
        assert not graph.path.exists()


SHAPES: list[Any] = [None, [], {}, "text", 7, [[]], [{}], {"m": 7}, {"m": []}, {"m": {"L": 7}}]
SHAPES += [{"m": {"L": ["x"]}}, {"m": {"payload_sha256": 1}}, float("inf"), 10**400, -1]


@pytest.mark.parametrize("field", ["failure", "proofs", "eviction", "label", "schema", "digest"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:20])
def test_verdicts_of_any_shape_are_read(library: GraphLibrary, field: str, shape: object) -> None:
    put(library)
    build_records = BuildRecords(library.folder)
    build_records.record_failure(KEY.digest, "L", "reason", attempts=1, version="1")
    build_records.record_eviction(KEY.digest, "pruned")
    path = library.folder.build_records / f"{KEY.digest}.json"
    record = json.loads(path.read_text())
    values = [shape]
    if isinstance(record[field], dict):
        values += [{**record[field], name: shape} for name in ("at", *record[field])]
    for value in values:
        path.write_text(json.dumps({**record, field: value}))
        build_record = build_records.read(KEY.digest)
        assert isinstance(build_record.load_checks, dict)
        assert build_record.failure is None or isinstance(build_record.failure.at, float)
        list(build_records.failures())
        library.delete(KEY.digest)
        library.explain(KEY)


@pytest.mark.parametrize("field", ["builds", "builds_of_others", "steps", "schema"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:20])
def test_histories_of_any_shape_are_read(library: GraphLibrary, field: str, shape: object) -> None:
    from onediff_ext.session.break_even import pictures_until_it_pays, speedup_of

    history = BuildHistory(library.folder)
    history.record_build("m", "inductor", "L", 1.0)
    history.record_step(
        checkpoint="c", machine="m", backend="b", size="1x1@1", eager_ms=2, compiled_ms=1
    )
    path = library.folder.home / "history.json"
    record = json.loads(path.read_text())
    (step,) = record["steps"]
    steps = [[{**step, name: shape}] for name in step]
    for changed in ({field: shape}, *({"steps": value} for value in steps)):
        path.write_text(json.dumps({**record, **changed}))
        measured = history.steps("m")
        speedup_of(measured)
        pictures_until_it_pays(history, ["L"], 1, measured)
        history.build_seconds("m", "inductor", ["L", "other"])


@pytest.mark.parametrize("step_ms", [0, -1.5, 0.0])
def test_steps_that_took_no_time_are_not_believed(library: GraphLibrary, step_ms: float) -> None:
    history = BuildHistory(library.folder)
    history.record_step(
        checkpoint="c", machine="m", backend="b", size="s", eager_ms=2, compiled_ms=1
    )
    path = library.folder.home / "history.json"
    record = json.loads(path.read_text())
    record["steps"][0]["compiled_ms"] = step_ms
    path.write_text(json.dumps(record))
    assert history.steps("m") == []


NASTY = "L\x1b]0;owned\x07\x1b[2J\r\x9b31m\ud800\u202eevil\u2066\0 末尾"


def test_text_from_files_cannot_command_the_terminal() -> None:
    assert printable("ResnetBlock2D 320→640 é 末尾\u3000x") == "ResnetBlock2D 320→640 é 末尾 x"
    shown = printable(NASTY)
    assert shown.isprintable()
    assert shown.encode("utf-8")
    assert "\\x1b]0;owned\\x07" in shown
    assert "\\ud800" in shown


@pytest.mark.parametrize("action", ["list", "explain", "status", "retry", "verify", "export"])
def test_no_command_hands_escape_sequences_to_the_terminal(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], action: str
) -> None:
    library = GraphLibrary(tmp_path / "store", MB)
    key = KindKey({"class": NASTY, NASTY: "x"})
    graph = put(library, NASTY, key)
    build_records = BuildRecords(library.folder)
    build_records.record_load_check(
        key.digest, NASTY, machine="m", payload_sha256="0" * 64, problem=NASTY
    )
    if action in ("retry", "status"):
        library.delete(key.digest)
        from onediff_ext import __version__

        build_records.record_failure(key.digest, NASTY, NASTY, attempts=1, version=__version__)
    CheckpointRecords(library.folder).record(
        "0" * 64, name=NASTY, path=NASTY, architecture=NASTY, kinds={key.digest: 1}
    )
    (library.folder.checkpoints / f"{'1' * 64}.json").write_text(json.dumps([NASTY]))
    more = {
        "explain": [graph.digest[:12]],
        "export": [str(tmp_path / "a.zip"), "--checkpoint", "missing"],
    }
    main(["graphs", action, *more.get(action, []), "--store", str(tmp_path / "store")])
    out, err = capsysbinary.readouterr()
    said = out + err
    assert said
    for forbidden in (b"\x1b", b"\x07", b"\r", b"\0", "\x9b".encode(), "\u202e".encode()):
        assert forbidden not in said, said
    if action in ("list", "explain", "status", "retry"):
        assert b"\\x1b" in said


def test_names_that_are_too_long_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x" * 5000
    put(GraphLibrary(tmp_path / "store", MB))
    store = ["--store", str(tmp_path / "store")]
    for command in (
        ["export", str(tmp_path / long), *store],
        ["export", str(tmp_path / long / "a"), *store],
        ["import", str(tmp_path / long), "--trust", *store],
        ["explain", long, *store],
        ["verify", "--store", str(tmp_path / long)],
        ["list", "--store", str(tmp_path / long)],
        ["prune", "--other-versions", "--store", str(tmp_path / long)],
    ):
        assert main(["graphs", *command]) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("at", [0.0, 1e300, -1e300, 1e18])
def test_any_time_has_some_day(at: float) -> None:
    assert day_of(at)


def test_the_module_prints_through_one_function() -> None:
    """All text of a file that `graphs` prints goes through `printable` or a table."""
    source = Path(graphs_command.__file__).read_text(encoding="utf-8")
    raw = [line.strip() for line in source.splitlines() if "print(f" in line]
    assert not [line for line in raw if ".label" in line or ".name" in line or "reason" in line]

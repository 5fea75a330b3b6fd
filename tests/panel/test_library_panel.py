"""The graph library as the panel shows it, and the actions of its buttons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onediff_ext.core.errors import OneDiffError, OptionError, UntrustedGraphError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.panel import html, library_actions
from onediff_ext.panel.graph_rows import (
    EVERYTHING,
    UNUSED,
    GraphGroup,
    age_text,
    digests_of,
    graph_groups,
    size_text,
)
from onediff_ext.panel.phrases import ENGLISH, phrases_in
from onediff_ext.store import CheckpointRecords, GraphLibrary, SavedTimes

HASHES = ("a" * 64, "b" * 64)


def store_graph(library: GraphLibrary, name: str) -> str:
    graph = library.put(
        KindKey({"class": name}),
        b"graph of " + name.encode(),
        label=f"{name} <320>",
        backend="eager",
        build_seconds=1.5,
        details={},
    )
    return graph.digest


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    """Three graphs: one for each of two checkpoints with one name, and one of no checkpoint."""
    made = GraphLibrary(tmp_path / "store", 10**9)
    one, two, _ = (store_graph(made, name) for name in ("One", "Two", "Three"))
    records = CheckpointRecords(made.folder)
    for content_hash, digest in zip(HASHES, (one, two), strict=True):
        records.record(
            content_hash,
            name="model",
            path="/secret/model.safetensors",
            architecture="sd1",
            kinds={digest: 4, "f" * 64: 1},
        )
    return made


def test_groups_are_by_checkpoint_with_distinct_names(library: GraphLibrary) -> None:
    groups = graph_groups(library)
    assert [group.name for group in groups] == ["model", f"model ({'b' * 8})", UNUSED]
    assert [len(group.graphs) for group in groups] == [1, 1, 1]
    assert [group.missing for group in groups] == [1, 1, 0]


def test_no_path_leaves_the_machine(library: GraphLibrary) -> None:
    described = str([group.as_json() for group in graph_groups(library)])
    assert "secret" not in described
    assert str(library.folder.root) not in described


def test_names_stand_for_graphs_and_unknown_ones_for_none(library: GraphLibrary) -> None:
    assert len(digests_of(library, EVERYTHING)) == 3
    assert len(digests_of(library, "model")) == 1
    assert digests_of(library, "../../etc/passwd") == []


def test_table_escapes_what_comes_from_files(library: GraphLibrary) -> None:
    table = html.graph_table(graph_groups(library), Path("/x"), 10**9, ENGLISH)
    assert "One &lt;320&gt;" in table
    assert "<320>" not in table
    assert "No graphs yet" in html.graph_table([], Path("/x"), 10**9, ENGLISH)


def test_the_time_that_graphs_saved_stands_in_the_checkpoints_row(library: GraphLibrary) -> None:
    SavedTimes(library.folder).add("here", HASHES[0], 11_520.0)
    groups = graph_groups(library, "here")
    assert [group.saved is not None for group in groups] == [True, False, False]
    table = html.graph_table(groups, Path("/x"), 10**9, ENGLISH)
    assert table.count("saved 3 h 12 min since today") == 1
    assert groups[0].as_json()["saved_s"] == 11_520.0
    elsewhere = html.graph_table(graph_groups(library, "there"), Path("/x"), 10**9, ENGLISH)
    assert "saved 3 h" not in elsewhere  # measured on another machine
    assert elsewhere.count("saved time: press Build now to") == 2


def test_what_is_missing_is_said_in_words(library: GraphLibrary) -> None:
    table = html.graph_table(graph_groups(library), Path("/x"), 10**9, ENGLISH)
    assert "missing" not in table
    assert table.count("1 not there yet: built when a picture needs them") == 2


def test_each_measured_size_has_its_speed_up() -> None:
    def row(*speedups: float) -> str:
        measured = tuple(zip(("512x512", "768x768"), speedups, strict=False))
        groups = [GraphGroup("model", "sd1", (), speedups=measured)]
        return html.graph_table(groups, Path("/x"), 10**9, ENGLISH)

    assert ">2.3x<" in row(2.31)
    assert ">no gain<" in row(0.9)
    assert ">no gain<" in row(1.0)
    assert ">–<" in row()
    assert ">512x512: 1.2x<br>768x768: no gain<" in row(1.2, 1.0)


def test_deleting_a_checkpoint_takes_its_graphs_and_its_record(library: GraphLibrary) -> None:
    said = library_actions.delete(library, "model")
    assert said.startswith("Graphs deleted: 1. ")
    assert len(library.entries()) == 2
    assert [g.name for g in graph_groups(library)] == ["model", UNUSED]  # the other one


def test_verifying_removes_what_is_damaged(library: GraphLibrary) -> None:
    assert library_actions.verify(library) == "Graphs checked: 3. All are intact."
    path = library.entries()[0].path
    path.write_bytes(path.read_bytes()[:-3])
    done, file = library_actions.verify(library).splitlines()
    assert done == "Files deleted: 1."
    assert file.startswith(path.name[:12])
    assert "the file has " in file
    assert len(library.entries()) == 2


def test_verifying_says_what_became_of_each_file(library: GraphLibrary) -> None:
    path = library.entries()[0].path
    path.write_bytes(path.read_bytes()[:8] + (9).to_bytes(4, "little") + b"of another version")
    (library.folder.root / "schema.json").write_bytes(b"damaged")
    (library.folder.root / "history.json").write_bytes(b"damaged")
    said = library_actions.verify(GraphLibrary(library.folder.root, 10**9))
    assert said.splitlines()[:3] == [
        *("Files written again: 1.", "Files left alone: 1.", "Files deleted: 1."),
    ]
    assert "schema.json: damaged" in said


@pytest.mark.parametrize("language", ["ja_JP", "zh_CN"])
def test_what_verifying_found_is_translated(library: GraphLibrary, language: str) -> None:
    cut, other = (graph.path for graph in library.entries()[:2])
    cut.write_bytes(cut.read_bytes()[:-3])
    other.write_bytes(other.read_bytes()[:8] + (9).to_bytes(4, "little") + b"of another version")
    (library.folder.root / "history.json").write_bytes(b"damaged")
    said = library_actions.verify(library, phrases_in(language))
    for line in said.splitlines():
        of_us = line.replace("history.json", "").replace("Expecting value", "")
        assert not re.search(r"file|version|record|bytes|damaged|deleted|alone", of_us), line
    assert len(said.splitlines()) == 5


def test_export_and_import_need_trust(library: GraphLibrary, tmp_path: Path) -> None:
    archive = library_actions.export(library, EVERYTHING, tmp_path)
    other = GraphLibrary(tmp_path / "other", 10**9)
    with pytest.raises(UntrustedGraphError):
        library_actions.import_archive(other, archive, trust=False)
    assert other.entries() == []
    assert library_actions.import_archive(other, archive, trust=True) == "Graphs imported: 3."
    said = library_actions.import_archive(other, archive, trust=True)
    assert said == "Graphs imported: 0; 3 were there already."
    assert all(group.imported for group in graph_groups(other))


def test_what_is_missing_is_said(library: GraphLibrary, tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        library_actions.export(library, "nobody", tmp_path)
    with pytest.raises(OptionError):
        library_actions.import_archive(library, None, trust=True)
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(OneDiffError):
        library_actions.import_archive(library, tmp_path / "text.zip", trust=True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "just now"), (300, "5 min ago"), (3 * 3600, "3 h ago"), (864000, "10 days ago")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(1e9, now=1e9 + seconds) == text
    assert age_text(0) == "–"


def test_sizes() -> None:
    assert [size_text(n) for n in (850_000, 12_300_000, 1_200_000_000)] == [
        "850 kB", "12.3 MB", "1.20 GB",
    ]  # fmt: skip

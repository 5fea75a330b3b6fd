"""Damaged and wrong stores, and those of other versions: pictures stay right."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from onediff_ext.store.folder import encode_schema
from tests.support.command_line import KINDS
from tests.support.sample_pictures import difference, save_pictures

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def store(command_line: CommandLine, tmp_path: Path) -> Path:
    """A copy of the store, with the graphs of the tests' checkpoint and no others."""
    archive, store = tmp_path / "all.zip", tmp_path / "store"
    name = command_line.checkpoint().stem
    assert command_line("graphs", "export", archive, "--checkpoint", name).status == 0
    assert command_line("graphs", "import", archive, "--trust", store=store).status == 0
    # An archive brings no load checks: these were made here.
    shutil.copytree(command_line.store / "verdicts", store / "verdicts", dirs_exist_ok=True)
    return store


@pytest.fixture
def draw(command_line: CommandLine, run: Run, tmp_path: Path) -> Callable[[Path], dict[str, Any]]:
    """Draws with a store, and compares with a run without graphs."""
    from tests.support.quick_builds import quick_builds

    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 104))
    plain = [
        Path(p["output"]) for p in run(folder, "-o", tmp_path / "plain", "--eager")["pictures"]
    ]

    def draw(store: Path) -> dict[str, Any]:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        with quick_builds():
            report = run(folder, "-o", out, store=store)
        drawn = [Path(picture["output"]) for picture in report["pictures"]]
        assert [path.name for path in drawn] == ["a.png", "b.png"]
        for one, two in zip(drawn, plain, strict=True):
            assert difference(one, two) <= 1
        return report

    return draw


def graph_files(store: Path) -> list[Path]:
    return sorted((store / "graphs").glob("*.graph"))


def damage(content: bytes, what: str) -> bytes:
    middle = len(content) // 2
    return {
        "cut": content[:middle],
        "empty": b"",
        "header": content[:60] + bytes([content[60] ^ 1]) + content[61:],
        "payload": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "another version": content[:8] + b"\x63\0\0\0" + content[12:16] + b"\0" * 32 + content[48:],
        "text": b"<html>" + content,
    }[what]


def test_damaged_graphs_are_built_again_and_the_reason_is_said(
    command_line: CommandLine, draw: Callable[[Path], dict[str, Any]], store: Path, tmp_path: Path
) -> None:
    kinds = ("cut", "empty", "header", "payload", "another version", "text")
    for path, what in zip(graph_files(store), kinds, strict=False):
        path.write_bytes(damage(path.read_bytes(), what))
    explained = command_line(
        "graphs", "explain", "-m", command_line.checkpoint(), "--backend", "eager", store=store
    )
    assert explained.out.count(": loaded, ") == KINDS - 6
    assert explained.out.count("the stored graph was damaged (") == 5
    assert explained.out.count("written by another version (schema 99") == 1
    assert explained.err.count("Stored graph ") == 6
    report = draw(store)
    assert report["graphs"] == {"built": 6, "loaded": KINDS - 6, "reused": 2 * KINDS}
    assert report["fallbacks"] == []
    assert command_line("graphs", "verify", store=store).out == f"{KINDS} sound, 0 damaged\n"
    assert draw(store)["graphs"]["built"] == 0


def test_a_sound_file_with_the_graph_of_another_kind_draws_nothing_wrong(
    draw: Callable[[Path], dict[str, Any]], store: Path
) -> None:
    from onediff_ext.store import GraphLibrary

    library = GraphLibrary(store, 2**30)
    entries = {entry.label: entry for entry in library.entries()}
    payload = {label: library.read_payload(entry) for label, entry in entries.items()}
    # Of the same class in another width, of another class, and no program at all.
    wrong = {
        "BasicTransformerBlock 64": payload["BasicTransformerBlock 32"],
        "BasicTransformerBlock 32": payload["ResnetBlock2D 96→32"],
        "ResnetBlock2D 96→32": b"not a program",
    }
    for label, other in wrong.items():
        key = entries[label].key
        library.put(key, other, label=label, backend="eager", build_seconds=0, details={})
    report = draw(store)
    # Graphs that were never loaded here get a load check first; bad ones are built again.
    assert report["graphs"]["loaded"] == KINDS - 3
    assert report["graphs"]["built"] == 3
    assert report["fallbacks"] == []


def test_a_store_of_another_version_is_left_alone(
    draw: Callable[[Path], dict[str, Any]], store: Path
) -> None:
    (store / "schema.json").write_bytes(encode_schema(99))
    before = {path: path.read_bytes() for path in graph_files(store)}
    assert draw(store)["graphs"] == {"built": KINDS, "loaded": 0, "reused": 2 * KINDS}
    assert {path: path.read_bytes() for path in graph_files(store)} == before
    assert (store / "schema.json").read_bytes() == encode_schema(99)
    assert draw(store)["graphs"]["built"] == 0  # ours lies beside it


def test_damaged_records_and_caches_do_not_matter(
    command_line: CommandLine, draw: Callable[[Path], dict[str, Any]], store: Path
) -> None:
    draw(store)
    files = [*(store / "checkpoints").glob("*.json"), store / "content-hashes.json"]
    for path in files:
        path.write_bytes(b'{"half": ')
    assert draw(store)["graphs"]["built"] == 0
    listed = command_line("graphs", "list", store=store)
    assert listed.status == 0
    assert f"{command_line.checkpoint().stem} (sd1): {KINDS} kinds" in listed.out


def test_a_store_that_is_too_small_keeps_what_fits(
    command_line: CommandLine, tmp_path: Path
) -> None:
    from tests.support.quick_builds import quick_builds

    store, folder = tmp_path / "store", save_pictures(tmp_path / "in", a=(64, 64))
    limit_bytes = 200_000
    options = ("--store-limit-gb", f"{limit_bytes / 2**30:.9f}")
    few = ("--steps", "1", "--strength", "1")
    with quick_builds():
        ended = command_line("img2img", folder, "-o", tmp_path / "out", *few, *options, store=store)
    assert ended.status == 0, ended
    assert f"{KINDS} built" in ended.out
    sizes = [path.stat().st_size for path in graph_files(store)]
    assert 0 < sum(sizes) <= limit_bytes
    assert len(sizes) < KINDS

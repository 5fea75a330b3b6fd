"""Exports are kept within test runs and for the next ones, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onediff_ext.engine.blocks.block_kind import BlockKind
from tests.support.kept_exports import kept_exports, read_program
from tests.support.kept_folders import EXPORTS_VARIABLE, digest_of, kept_folder


@pytest.mark.parametrize("is_test_run", [True, False])
def test_only_a_test_run_keeps_exports(
    is_test_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_test_run:
        monkeypatch.setenv(EXPORTS_VARIABLE, str(tmp_path))
    else:
        monkeypatch.delenv(EXPORTS_VARIABLE, raising=False)
    before = BlockKind.__init__
    with kept_exports():
        assert (BlockKind.__init__ is not before) == is_test_run
    assert BlockKind.__init__ is before


def test_a_damaged_program_is_exported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXPORTS_VARIABLE, str(tmp_path))
    exports = []

    def make_kind(kind: BlockKind) -> None:
        kind.key = type("Key", (), {"digest": "a kind"})()
        kind.prepare_export = lambda device: lambda: exports.append(device) or b"program"

    monkeypatch.setattr(BlockKind, "__init__", make_kind)
    with kept_exports():
        export = BlockKind().prepare_export(torch.device("cpu"))
    assert [export(), export()] == [b"program"] * 2
    assert len(exports) == 1
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert read_program(path) is None
    assert export() == b"program"
    assert len(exports) == 2
    assert read_program(path) == b"program"


def test_a_folder_belongs_to_its_sources(tmp_path: Path) -> None:
    source = tmp_path / "engine" / "exporter.py"
    source.parent.mkdir()
    source.write_text("one")
    (tmp_path / "panel.py").write_text("decides nothing")
    first = digest_of(("engine/*.py",), tmp_path)
    (tmp_path / "panel.py").write_text("changed")
    assert digest_of(("engine/*.py",), tmp_path) == first
    source.write_text("two")
    assert digest_of(("engine/*.py",), tmp_path) != first


def test_only_the_folders_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.kept_folders.default_root", lambda environ: tmp_path)
    folders = []
    for number in range(6):
        monkeypatch.setattr("tests.support.kept_folders.digest_of", lambda patterns: str(number))  # noqa: B023
        folders.append(kept_folder("kept", ()))
    assert [folder.exists() for folder in folders] == [False] * 2 + [True] * 4

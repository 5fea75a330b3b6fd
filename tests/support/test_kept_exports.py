"""Exports are kept within test runs and for the next ones, and only there."""

from __future__ import annotations

import io
import json
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.building.worker_process import Built, WorkerProcess
from onediff_ext.engine.blocks.block_kind import BlockKind
from tests.support.kept_builds import digest_of_program, kept_builds
from tests.support.kept_exports import kept_exports, read_bytes
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
    assert read_bytes(path) is None
    assert export() == b"program"
    assert len(exports) == 2
    assert read_bytes(path) == b"program"


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


def test_a_programs_graph_does_not_depend_on_where_it_was_traced() -> None:
    def program(**node: object) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/models/model.json", json.dumps(node))
            archive.writestr("archive/version", "0")
        return buffer.getvalue()

    def digest(**node: object) -> str:
        return digest_of_program(program(**node), torch.device("cpu"))

    here = digest(stack_trace='File "/here/a \\"b\\".py", line 3', target="silu")
    assert digest(stack_trace="File /there/c.py, line 4\n", target="silu") == here
    assert digest(stack_trace='File "/here/a \\"b\\".py", line 3', target="gelu") != here


def test_a_graph_that_several_need_at_once_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile_slowly(worker: Any, program: bytes, device: str, timeout_s: float) -> Built:
        compiled.append(device)
        time.sleep(0.1)
        return Built(b"a graph", 0.1)

    monkeypatch.setattr("tests.support.kept_folders.default_root", lambda environ: tmp_path)
    monkeypatch.setattr(WorkerProcess, "build", compile_slowly)
    program, worker = io.BytesIO(), SimpleNamespace(_backend="inductor")
    with zipfile.ZipFile(program, "w") as archive:
        archive.writestr("models/model.json", "{}")

    def build(_: int) -> bytes:
        made: Built = WorkerProcess.build(worker, program.getvalue(), "cpu", 1.0)  # type: ignore[arg-type]
        return made.payload

    with kept_builds(), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(build, range(4))) == [b"a graph"] * 4
    assert compiled == ["cpu"]

"""Files of the compiler that one build process leaves to the next."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from onediff_ext.backends.inductor import compiler_files
from onediff_ext.backends.inductor.compiler_files import CompilerFiles, reused_compiler_files
from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.engine.backend_port import COMPILER_FILES_VARIABLE
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.export.exporter import export_block, save_program
from tests.support.contract_blocks import BLOCKS, CPU

CONTENT = {
    "headers/caaa.h": b"#include <a>\n",
    "headers/caaa.h.gch": b"gpch" * 1000,
    "cache/bc/cbcd.cpp": b'extern "C" void __avx_chk_kernel() {}',
    "cache/bc/cbcd.so": b"\x7fELF" * 100,
}


@pytest.fixture
def process(tmp_path: Path) -> Callable[[str], CompilerFiles]:
    """Make the compiler's files of a process, which has a folder of its own; all share one."""

    def make(name: str) -> CompilerFiles:
        own = tmp_path / name
        return CompilerFiles(tmp_path / "kept" / "machine", own / "headers", own / "cache")

    return make


def build(folder: Path) -> None:
    """Do what Inductor does: make each file that is missing."""
    for name, content in CONTENT.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(content)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture
def kept(tmp_path: Path, process: Callable[[str], CompilerFiles]) -> Path:
    """The shared folder after a first process has built."""
    first = process("first")
    assert not first.take()
    build(tmp_path / "first")
    first.keep()
    return tmp_path / "kept" / "machine"


def test_the_next_process_finds_what_the_first_one_has_made(tmp_path, process, kept):
    second = process("second")
    assert second.take()
    assert files_of(tmp_path / "second") == CONTENT
    assert second.take()  # once is enough


@pytest.mark.parametrize("links", [True, False])
def test_both_disks_with_and_without_links_serve(tmp_path, process, kept, monkeypatch, links):
    if not links:

        def refuse(*_: object) -> None:
            raise OSError(errno.EXDEV, "another disk")

        monkeypatch.setattr(os, "link", refuse)
    assert process("second").take()
    assert files_of(tmp_path / "second") == CONTENT
    assert (tmp_path / "second" / "headers" / "caaa.h").stat().st_nlink == (2 if links else 1)


@pytest.mark.parametrize("damage", [b"", b"gpch" * 999, b"gpcx" + b"gpch" * 999, b"gpch" * 1001])
def test_a_damaged_header_is_deleted_and_made_again(tmp_path, process, kept, damage):
    damaged = next(kept.glob("caaa.h.gch.*"))
    damaged.unlink()
    damaged.write_bytes(damage)
    second = process("second")
    assert second.take()
    assert not damaged.exists()
    assert "headers/caaa.h.gch" not in files_of(tmp_path / "second")
    assert "headers/caaa.h" in files_of(tmp_path / "second")
    build(tmp_path / "second")
    second.keep()
    assert process("third").take()
    assert files_of(tmp_path / "third") == CONTENT


def test_files_from_before_this_process_are_not_kept(tmp_path, process):
    """They may be another compiler's partial files."""
    build(tmp_path / "first")
    first = process("first")
    assert not first.take()
    first.keep()
    assert not process("second").take()


def test_a_header_whose_compiler_failed_and_other_files_are_not_kept(tmp_path, process):
    first = process("first")
    build(tmp_path / "first")
    (tmp_path / "first/headers/caaa.h.gch").unlink()
    (tmp_path / "first/cache/bc/cbcd.so").unlink()
    for name in ("graph.cpp", "graph.so"):
        (tmp_path / "first/cache/bc" / name).write_bytes(b"a graph")
    first.keep()
    assert not process("second").take()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no permission bits")
def test_files_that_others_may_write_are_not_used(tmp_path, process, kept):
    for path in kept.iterdir():
        path.chmod(0o666)
    assert not process("second").take()
    assert files_of(tmp_path / "second") == {}


def test_what_is_kept_is_this_users_alone(kept):
    assert kept.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept.iterdir())


def test_processes_that_keep_and_take_at_once_disturb_nobody(tmp_path, process):
    def one(number: int) -> dict[str, bytes]:
        name = f"process {number}"
        files = process(name)
        files.take()
        build(tmp_path / name)
        files.keep()
        return files_of(tmp_path / name)

    with ThreadPoolExecutor(8) as pool:
        assert all(found == CONTENT for found in pool.map(one, range(24)))
    assert len(list((tmp_path / "kept/machine").iterdir())) == len(CONTENT)


def test_a_full_disk_costs_nothing_but_time(tmp_path, process, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = process("first")
    build(tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        first.keep()
    assert not process("second").take()
    assert list((tmp_path / "kept/machine").iterdir()) == []


def test_old_files_and_machines_go(tmp_path, process, kept):
    for number in range(30):
        path = kept / f"old{number}.h.{hashlib.sha256().hexdigest()}"
        path.write_bytes(b"")
        os.utime(path, (number, number))
    for number in range(3):
        other = kept.parent / f"machine {number}"
        other.mkdir()
        os.utime(other, (number, number))
    part = kept / "killed.part"
    part.write_bytes(b"")
    os.utime(part, (0, 0))
    second = process("second")
    assert second.take()
    build(tmp_path / "second")
    (tmp_path / "second/headers/new.h").write_bytes(b"")
    (tmp_path / "second/headers/new.h.gch").write_bytes(b"")
    second.keep()
    assert len(list(kept.iterdir())) == 24
    assert not part.exists()
    assert {path.name for path in kept.parent.iterdir()} == {"machine", "machine 1", "machine 2"}
    assert process("third").take()
    assert CONTENT.items() <= files_of(tmp_path / "third").items()


def test_while_nothing_is_kept_one_process_builds_and_the_others_wait(
    tmp_path, process, monkeypatch
):
    mine = threading.local()
    monkeypatch.setattr(compiler_files, "_files_of_this_process", lambda: mine.files)
    made: list[int] = []

    def one(number: int) -> None:
        mine.files = process(f"process {number}")
        with reused_compiler_files():
            if not (tmp_path / f"process {number}/headers/caaa.h.gch").exists():
                made.append(number)
                time.sleep(0.1)
                build(tmp_path / f"process {number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    assert len(made) == 1


def test_a_failed_build_keeps_nothing_and_lets_the_next_one_in(tmp_path, process, monkeypatch):
    monkeypatch.setattr(compiler_files, "_files_of_this_process", lambda: files)
    files = process("first")
    build(tmp_path / "first")
    with pytest.raises(RuntimeError, match="the compiler failed"), reused_compiler_files():
        raise RuntimeError("the compiler failed")
    files = process("second")
    with reused_compiler_files():
        build(tmp_path / "second")
    assert process("third").take()


def test_a_wait_that_takes_too_long_ends(tmp_path, process, monkeypatch):
    monkeypatch.setattr(compiler_files, "_WAIT_S", 0.05)
    files = process("second")
    monkeypatch.setattr(compiler_files, "_files_of_this_process", lambda: files)
    with process("first").lock(), reused_compiler_files():
        build(tmp_path / "second")
    assert process("third").take()


def program_of_a_block() -> bytes:
    family, make_block, make_inputs = BLOCKS["resnet"]
    block = make_block()
    tree = BlockTree(block, ("diffusers.",))
    call = family.graph_call(block, family.bind(block, make_inputs(2, 8, 8), {}))
    traced = tree.copy()
    family.prepare(traced)
    return save_program(export_block(traced, family, tree.names, tree.weights(), call, CPU))


def test_workers_build_with_kept_headers_also_with_a_truncated_one(tmp_path, monkeypatch):
    """With the real compiler. A truncated header ends GCC with a fatal error."""
    pytest.importorskip("torch._inductor.cpp_builder")
    from torch._inductor import codecache

    if not hasattr(codecache, "_HEADER_DIR"):
        pytest.skip(f"torch {torch.__version__} precompiles no headers")
    worker, program = WorkerProcess("inductor", tmp_path), program_of_a_block()
    try:
        worker.build(program, "cpu", 600)  # after it the tests' own folder has everything
    finally:
        worker.close()
    files = compiler_files._files_of_this_process()
    assert files is not None
    machine = files.kept
    monkeypatch.setenv(COMPILER_FILES_VARIABLE, str(tmp_path / "kept"))
    copy = shutil.copytree(machine, tmp_path / "kept" / machine.name)
    # Workers that began at the same time keep one more of a header; one of each is enough here.
    for each in sorted(copy.glob("*.h.gch.*"), key=lambda path: path.stat().st_mtime):
        if len(list(copy.glob(f"{each.name.split('.h.gch.')[0]}.h.gch.*"))) > 1:
            each.unlink()
    truncated = min(copy.glob("*.h.gch.*"), key=lambda path: path.stat().st_size)
    os.truncate(truncated, truncated.stat().st_size // 2)
    worker = WorkerProcess("inductor", tmp_path)
    try:
        worker.build(program, "cpu", 600)
        untouched = [path for path in copy.glob("*.h.gch.*") if path.stat().st_nlink == 2]
        assert len(untouched) == 1  # this worker's compiler has read it, at its own place
    finally:
        worker.close()
    names = {path.name.split(".h.gch.")[0] for path in copy.glob("*.h.gch.*")}
    assert len(names) == len(list(copy.glob("*.h.gch.*"))) == 2

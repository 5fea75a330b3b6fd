"""Build folders, and their removal after the owner was killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from onediff_ext.building import build_folder
from onediff_ext.building.build_folder import BuildFolder, safe_parent
from onediff_ext.core.errors import BackendError
from onediff_ext.store.folder import StoreFolder

posix = pytest.mark.skipif(os.name == "nt", reason="permission bits are POSIX's")


def test_removed_at_the_end(tmp_path: Path):
    folder = BuildFolder(tmp_path)
    (folder.path / "worker").mkdir()
    (folder.path / "worker" / "graph.bin").write_bytes(b"x")
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_living_owners_folder_stays_and_a_dead_ones_goes(tmp_path: Path):
    code = (
        "import os, sys, pathlib\n"
        "from onediff_ext.building.build_folder import BuildFolder\n"
        "BuildFolder(pathlib.Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert len(list(tmp_path.iterdir())) == 1
    first = BuildFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [first.path]
    second = BuildFolder(tmp_path)
    assert {first.path, second.path} == set(tmp_path.iterdir())
    for folder in (first, second):
        folder.remove()


def test_foreign_folders_stay(tmp_path: Path):
    foreign = tmp_path / "onediff-build-of-somebody"
    foreign.mkdir()
    os.utime(foreign, (1, 1))
    BuildFolder(tmp_path).remove()
    assert foreign.is_dir()


def test_a_folder_that_was_never_locked_goes_when_it_is_old(tmp_path: Path):
    forsaken = tmp_path / "onediff-build-ab12_xyz"
    forsaken.mkdir()
    BuildFolder(tmp_path).remove()
    assert forsaken.is_dir()  # somebody may just be making it
    os.utime(forsaken, (1, 1))
    BuildFolder(tmp_path).remove()
    assert not forsaken.exists()


@posix
@pytest.mark.parametrize("how", ["folder of another user", "folder for all", "link"])
def test_a_planted_lock_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Some versions of filelock truncate the file that they lock, also through a link."""
    mine, planted = tmp_path / "mine.txt", tmp_path / "onediff-build-ab12_xyz"
    mine.write_text("all my work")
    real = tmp_path / "elsewhere" if how == "link" else planted
    real.mkdir()
    if how == "link":
        planted.symlink_to(real)
    (real / "owner.lock").symlink_to(mine)
    os.utime(real, (1, 1))
    if how == "folder of another user":
        somebody = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: somebody)
    if how == "folder for all":
        real.chmod(0o777)
    taken = []
    lock_of = build_folder._lock_of
    monkeypatch.setattr(
        build_folder, "_lock_of", lambda folder: taken.append(folder) or lock_of(folder)
    )
    folder = BuildFolder(tmp_path)
    assert taken == [folder.path]
    folder.remove()
    assert mine.read_text() == "all my work"
    assert planted.exists()


@posix
def test_a_build_folder_is_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = BuildFolder(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()


@posix
@pytest.mark.parametrize(("mode", "is_safe"), [(0o700, True), (0o1777, True), (0o777, False)])
def test_graphs_are_built_where_nobody_can_swap_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_safe: bool
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    store = StoreFolder(tmp_path / "store")
    assert safe_parent(store) == (tmp_path / "tmp" if is_safe else store.tmp)


@posix
def test_without_a_safe_folder_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o777)
    (tmp_path / "store").write_text("no folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.raises(BackendError, match=r"chmod \+t"):
        safe_parent(StoreFolder(tmp_path / "store"))

"""Folders of build workers, also after the owner was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from onediff_ext.service.build_folder import BuildFolder


def test_removed_at_the_end(tmp_path: Path):
    folder = BuildFolder(tmp_path)
    (folder.path / "worker").mkdir()
    (folder.path / "worker" / "graph.bin").write_bytes(b"x")
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_living_owners_folder_stays_and_a_dead_ones_goes(tmp_path: Path):
    code = (
        "import os, signal, sys, pathlib\n"
        "from onediff_ext.service.build_folder import BuildFolder\n"
        "BuildFolder(pathlib.Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
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

"""Each loaded library is a separate one, although the system reuses descriptor numbers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.backends.inductor import aot_library
from onediff_ext.backends.inductor.aot_library import library_path


@pytest.mark.skipif(sys.platform != "linux", reason="libraries in memory are Linux's")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_libraries_loaded_one_after_the_other_are_different(tmp_path: Path) -> None:
    answers = []
    for number in range(5):
        source, target = tmp_path / f"{number}.c", tmp_path / f"{number}.so"
        source.write_text(f"int answer(void) {{ return {number}; }}")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, source], check=True)
        with library_path(target.read_bytes()) as path:
            answers.append(ctypes.CDLL(path))
    assert [library.answer() for library in answers] == list(range(5))


class Windows(SimpleNamespace):
    """`os` without libraries in memory. Files that are loaded cannot be deleted."""

    loaded: set[str]

    def __getattr__(self, name: str) -> Any:
        if name == "memfd_create":
            raise AttributeError(name)
        return getattr(os, name)

    def unlink(self, path: str) -> None:
        if path in self.loaded:
            raise PermissionError(13, "Access is denied", path)
        os.unlink(path)


def test_libraries_of_earlier_processes_go_where_a_loaded_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each process of a Windows user would leave the files of all its graphs."""
    windows = Windows(loaded=set())
    monkeypatch.setattr(aot_library, "os", windows)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    aot_library._remove_left.cache_clear()
    for content in (b"first", b"second"):
        with library_path(content) as path:
            assert Path(path).read_bytes() == content
            windows.loaded.add(path)
    hour_ago = time.time() - 2 * 3600
    os.utime(sorted(windows.loaded)[0], (hour_ago, hour_ago))
    (tmp_path / "onediff-other.so").touch()
    os.utime(tmp_path / "onediff-other.so", (hour_ago, hour_ago))
    aot_library._remove_left.cache_clear()  # as in another process, when the first one has ended
    with library_path(b"third") as path:
        left = {str(found) for found in tmp_path.iterdir()}
    young = sorted(windows.loaded)[1]
    assert left == {str(tmp_path / "onediff-other.so"), young, path}
    assert {str(found) for found in tmp_path.iterdir()} == left - {path}
    aot_library._remove_left.cache_clear()

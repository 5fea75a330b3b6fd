"""Each graph that is loaded is its own, though the system reuses descriptors' numbers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onediff_ext.backends.inductor.backend import _as_library


@pytest.mark.skipif(sys.platform != "linux", reason="libraries in memory are Linux's")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_libraries_loaded_one_after_the_other_are_different(tmp_path: Path) -> None:
    answers = []
    for number in range(5):
        source, target = tmp_path / f"{number}.c", tmp_path / f"{number}.so"
        source.write_text(f"int answer(void) {{ return {number}; }}")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, source], check=True)
        with _as_library(target.read_bytes()) as path:
            answers.append(ctypes.CDLL(path))
    assert [library.answer() for library in answers] == list(range(5))

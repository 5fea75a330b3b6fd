"""Each graph of a process is loaded from a path of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_no_two_libraries_have_one_path() -> None:
    from onediff_ext.backends.inductor import _as_library

    paths = []
    for number in range(20):
        payload = str(number).encode()
        with _as_library(payload) as path:
            assert Path(path).read_bytes() == payload
            paths.append(path)
    assert len(set(paths)) == len(paths)

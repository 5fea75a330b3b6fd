"""The output of `graphs list` for graphs that each process plans again."""

from __future__ import annotations

import pytest

from onediff_ext.cli.main import main
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary


@pytest.mark.parametrize("backend", ["oneflow", "inductor"])
def test_only_of_oneflow_it_says_that_programs_are_kept(tmp_path, capsys, backend):
    library = GraphLibrary(tmp_path, 2**30)
    key = KindKey({"backend": backend, "device": "cpu"})
    library.put(
        key, b"program", label="ResnetBlock2D", backend=backend, build_seconds=1.0, details={}
    )
    assert main(["graphs", "list", "--store", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert backend in printed
    assert ("graphs are kept as programs: each process plans each new size" in printed) == (
        backend == "oneflow"
    )

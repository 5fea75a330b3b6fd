"""What a forked child does with the objects of its parent."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from onediff_ext.building.forked_exporter import ForkedExporter
from tests.support.systems import needs_fork


class Noted:
    """Writes down the process that destroys it. A CUDA graph would end a child there."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


@needs_fork
def test_a_child_does_not_destroy_the_parent_s_garbage(tmp_path: Path) -> None:
    noted = tmp_path / "destroyed"

    def export() -> bytes:
        gc.collect()
        return b"program"

    kind: Any = object()
    gc.disable()
    try:
        Noted(noted)
        child = ForkedExporter([(kind, export)], in_background=False)
        results = []
        while not child.finished:
            results += child.read()
        child.kill()
        assert [(result.kind, result.program) for result in results] == [(kind, b"program")]
        assert not noted.exists()
    finally:
        gc.enable()
    gc.collect()
    assert noted.read_text() == f"{os.getpid()}\n"

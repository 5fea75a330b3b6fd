"""The worker's program says what is at fault, which decides what is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_ext.building.worker.program import _answer, _blame
from onediff_ext.core.errors import BackendError


@pytest.mark.parametrize(
    ("text", "blamed"),
    [
        ("Inductor failed: InductorError: MemoryError:", "memory"),
        ("C++ compile error\nc++: fatal error: Killed signal terminated program cc1plus", "memory"),
        ("Inductor failed: SystemError: error return without exception set", "memory"),
        ("cc1plus: out of memory allocating 65536 bytes", "memory"),
        ("[Errno 28] No space left on device: '/tmp/x.so'", "machine"),
        ("The block cannot be traced: NameError: x", "graph"),
        # Windows
        ("Inductor failed: InvalidCxxCompiler: Compiler: cl is not found.", "machine"),
        ("Torch.compile() is only support MSVC with English language pack,", "machine"),
        ("[WinError 112] Es steht nicht genug Speicherplatz auf dem Datenträger", "machine"),
        ("fatal error C1060: compiler is out of heap space", "memory"),
        ("[WinError 1455] Die Auslagerungsdatei ist zu klein", "memory"),
        ("[WinError 1450] Insufficient system resources", "graph"),
    ],
)
def test_by_what_was_said(text: str, blamed: str) -> None:
    assert _blame(BackendError(text)) == blamed


def test_an_error_without_words() -> None:
    assert _blame(MemoryError()) == "memory"


def test_a_program_that_cannot_be_read_is_the_workers_fault(tmp_path: Path) -> None:
    program = tmp_path / "program.pt2"
    program.write_bytes(b"half of one")
    request = {"program": str(program), "graph": str(tmp_path / "graph.bin")}
    answer = _answer({**request, "backend": "eager", "device": "cpu", "task": "build"})
    assert answer["blame"] == "memory"
    assert "cannot be read" in str(answer["error"])

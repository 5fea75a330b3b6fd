"""Files of text are opened with an encoding: without one, Windows reads them in a code page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("onediff_ext", "scripts", "tools", "benchmarks", "install.py")
# The rule is one that ruff previews; its other previews change what stable rules say.
CHECK = ("-m", "ruff", "check", "--isolated", "--no-cache", "--preview", "--select", "PLW1514")


def check(*paths: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("ruff", reason="ruff is not installed")
    return subprocess.run(
        [sys.executable, *CHECK, *paths], cwd=ROOT, capture_output=True, encoding="utf-8"
    )


def test_every_file_of_text_has_an_encoding() -> None:
    done = check(*SOURCES)
    assert done.returncode == 0, done.stdout


def test_one_without_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("from pathlib import Path\nPath('a').read_text()\n", encoding="utf-8")
    assert check(str(planted)).returncode == 1


def test_a_clone_has_the_same_bytes_on_each_system() -> None:
    """Git for Windows would give text files other line ends; golden files are bytes."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone, or git is not installed")
    asked = ["git", "check-attr", "text", "eol", "--", "tests/golden/build-record-2.json"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    values = [line.rpartition(": ")[2] for line in done.stdout.splitlines()]
    assert values == ["auto", "lf"]

"""Sizes proposed from the pictures that were drawn last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.errors import ShapeError
from onediff_ext.core.shapes import BatchShape
from onediff_ext.ui.recent import merge_sizes, recent_sizes


def draw(path: Path, width: int, height: int, age_s: float = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height)).save(path)
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))


def test_most_frequent_first_and_of_equal_ones_the_larger(tmp_path: Path) -> None:
    for number in range(3):
        draw(tmp_path / "2026-11-20" / f"{number}.png", 512, 768)
    draw(tmp_path / "a.jpg", 64, 64)
    draw(tmp_path / "b.webp", 1024, 1024)
    found = recent_sizes([tmp_path, tmp_path / "missing"])
    assert found == [BatchShape(512, 768), BatchShape(1024, 1024), BatchShape(64, 64)]


def test_only_the_newest_count(tmp_path: Path) -> None:
    draw(tmp_path / "new.png", 512, 512)
    for number in range(5):
        draw(tmp_path / f"old-{number}.png", 640, 640, age_s=1000)
    assert recent_sizes([tmp_path], pictures=1) == [BatchShape(512, 512)]
    assert recent_sizes([tmp_path], sizes=1) == [BatchShape(640, 640)]


def test_what_cannot_be_generated_is_left_out(tmp_path: Path) -> None:
    draw(tmp_path / "grid.png", 1027, 512)
    draw(tmp_path / "icon.png", 32, 32)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "notes.txt").write_text("512x512")
    assert recent_sizes([tmp_path]) == []
    assert recent_sizes([]) == []


def test_sizes_are_added_once() -> None:
    more = [BatchShape(512, 768), BatchShape(1024, 1024, 2)]
    assert merge_sizes("512x768", more) == "512x768, 1024x1024@2"
    assert merge_sizes("", []) == ""
    with pytest.raises(ShapeError):
        merge_sizes("large", more)

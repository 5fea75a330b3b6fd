"""Sizes for a warm-up: proposed from pictures, added to what a person typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.errors import ShapeError
from onediff_ext.core.shapes import BatchShape
from onediff_ext.panel.warm_up_sizes import merge_sizes, recent_sizes


def test_output_folders_that_do_not_exist_yet_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "2026-11-20").mkdir()
    for number in range(2):
        Image.new("RGB", (512, 768)).save(tmp_path / "2026-11-20" / f"{number}.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    found = recent_sizes([tmp_path / "missing", tmp_path])
    assert found == [BatchShape(512, 768), BatchShape(64, 64)]
    assert recent_sizes([tmp_path / "missing"]) == recent_sizes([]) == []


def test_sizes_are_added_once() -> None:
    more = [BatchShape(512, 768), BatchShape(1024, 1024, 2)]
    assert merge_sizes("512x768", more) == "512x768, 1024x1024@2"
    assert merge_sizes("", []) == ""
    with pytest.raises(ShapeError):
        merge_sizes("large", more)

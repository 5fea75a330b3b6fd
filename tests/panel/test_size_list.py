"""Sizes for a warm-up: proposed from pictures, added to the list that the user typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.errors import ShapeError
from onediff_ext.core.shapes import BatchShape
from onediff_ext.panel.size_list import with_sizes_added
from tests.support.still_panel_host import StillPanelHost


def test_recent_sizes_pass_over_missing_folders(tmp_path: Path) -> None:
    dated = tmp_path / "pictures" / "2026-11-20"
    dated.mkdir(parents=True)
    for number in range(2):
        Image.new("RGB", (512, 768)).save(dated / f"{number}.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "pictures" / "a.png")
    host = StillPanelHost(tmp_path)
    host.folders = [tmp_path / "missing", tmp_path / "pictures"]
    assert host.recent_sizes() == [BatchShape(512, 768), BatchShape(64, 64)]
    host.folders = [tmp_path / "missing"]
    assert host.recent_sizes() == []
    host.folders = []
    assert host.recent_sizes() == []


def test_sizes_are_added_once() -> None:
    more = [BatchShape(512, 768), BatchShape(1024, 1024, 2)]
    assert with_sizes_added("512x768", more) == "512x768, 1024x1024@2"
    assert with_sizes_added("", []) == ""
    with pytest.raises(ShapeError):
        with_sizes_added("large", more)

"""Sizes for a warm-up: proposed from pictures, added to the list that the user typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.shapes import BatchShape
from onediff_ext.panel.size_list import read_tab_size, with_sizes_added
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
    assert with_sizes_added(["512x768"], more) == ["512x768", "1024x1024@2"]
    assert with_sizes_added([], []) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("513x764@2", BatchShape(512, 768, 2)),
        ("64x64@1", BatchShape(64, 64)),
        ("", None),
        ("512x512@", None),
        ("x@1", None),
        ("512x512@0", None),
    ],
)
def test_a_tabs_sliders_are_read_as_the_nearest_size(text: str, size: BatchShape | None) -> None:
    assert read_tab_size(text) == size

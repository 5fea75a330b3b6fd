"""Captions beside pictures, and the sheet that shows pictures together."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.errors import PictureError
from onediff_ext.pictures.captions import read_caption
from onediff_ext.pictures.contact_sheet import make_contact_sheet
from onediff_ext.pictures.finding import find_pictures
from onediff_ext.pictures.report import Report


def test_a_caption_is_one_line(tmp_path: Path):
    (tmp_path / "cat.txt").write_text("\ufeffa cat,\n  on a sofa\n", encoding="utf-8")
    assert read_caption(tmp_path / "cat.jpg") == "a cat, on a sofa"
    assert read_caption(tmp_path / "dog.jpg") is None
    (tmp_path / "empty.txt").write_text(" \n")
    assert read_caption(tmp_path / "empty.jpg") is None


def test_a_caption_that_is_no_text(tmp_path: Path):
    (tmp_path / "cat.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PictureError, match="cannot be read"):
        read_caption(tmp_path / "cat.jpg")


def test_captions_are_not_reported_but_other_texts_are(tmp_path: Path):
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    for name in ("cat.txt", "notes.txt"):
        (tmp_path / name).write_text("x")
    report = Report()
    assert [p.path.name for p in find_pictures([tmp_path], report=report)] == ["cat.png"]
    assert [entry.path.name for entry in report.skipped] == ["notes.txt"]


def test_a_sheet_holds_all_pictures(tmp_path: Path):
    for i, size in enumerate(((30, 60), (60, 30), (1, 1))):
        Image.new("RGB", size, (255, 0, 0)).save(tmp_path / f"{i}.png")
    paths = sorted(tmp_path.glob("*.png"))
    sheet = make_contact_sheet([("one", paths), ("two", paths[::-1])], row_height_px=40)
    assert sheet.width >= 80 + 80 + 40
    assert sheet.height >= 2 * 40
    assert (255, 0, 0) in {color for _, color in sheet.getcolors(10**6)}

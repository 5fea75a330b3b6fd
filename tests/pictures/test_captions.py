"""Captions beside pictures, and the sheet that shows pictures together."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.errors import PictureError
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.batch.planning import plan_batch
from onediff_ext.pictures.captions import read_caption
from onediff_ext.pictures.contact_sheet import make_contact_sheet
from onediff_ext.pictures.finding import find_pictures
from onediff_ext.pictures.size_rules import OwnSize
from onediff_ext.pictures.skipped import SkipReport


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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_caption_that_is_no_file_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "large.txt").write_bytes(b"a " * 2**20)
    for name in ("pipe", "endless", "loop", "folder", "large"):
        with pytest.raises(PictureError, match="caption"):
            read_caption(tmp_path / f"{name}.jpg")


def test_a_broken_caption_leaves_the_other_pictures_alone(tmp_path: Path):
    for name in ("a", "b", "c"):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{name}.png")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    report = SkipReport()
    job = BatchJob([tmp_path], tmp_path / "out", OwnSize(), seed=0, captions=True)
    plan = plan_batch(job, lambda one: {"prompt": one.caption}, report)
    assert [result.path.name for result in plan.todo] == ["a.png", "c.png"]
    assert [entry.path.name for entry in report.failures] == ["b.png"]


def test_a_folder_of_many_captions_is_listed_in_linear_time(tmp_path: Path):
    for number in range(3000):
        (tmp_path / f"{number}.txt").touch()
    start = time.process_time()
    assert find_pictures([tmp_path], report=SkipReport()) == []
    assert time.process_time() - start < 5


def test_captions_are_not_reported_but_other_texts_are(tmp_path: Path):
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    for name in ("cat.txt", "notes.txt"):
        (tmp_path / name).write_text("x")
    report = SkipReport()
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


def test_a_caption_in_capitals_is_used(tmp_path: Path):
    # Cameras and Windows programs write CAT.JPG and CAT.TXT.
    Image.new("RGB", (64, 64)).save(tmp_path / "CAT.JPG")
    (tmp_path / "CAT.TXT").write_text("a cat")
    report = SkipReport()
    job = BatchJob([tmp_path], tmp_path / "out", OwnSize(), seed=0, captions=True)
    plan = plan_batch(job, lambda one: {"prompt": one.caption}, report)
    assert [result.planned.caption for result in plan.todo] == ["a cat"]
    assert report.skipped == []


def test_a_text_that_is_not_read_as_a_caption_is_reported(tmp_path: Path):
    Image.new("RGB", (64, 64)).save(tmp_path / "cat.jpg")
    (tmp_path / "cat.tXt").write_text("a cat")
    report = SkipReport()
    find_pictures([tmp_path], report=report)
    read = read_caption(tmp_path / "cat.jpg")  # on a disk that ignores case
    assert read == "a cat" or [entry.path.name for entry in report.skipped] == ["cat.tXt"]

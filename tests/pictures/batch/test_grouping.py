"""Grouping by canvas, and reading in batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.errors import OptionError
from onediff_ext.pictures.batch import grouping
from onediff_ext.pictures.batch.grouping import (
    Group,
    group_by_canvas,
    load_pictures,
    plan_pictures,
    split_group,
)
from onediff_ext.pictures.size_rules import OwnSize
from onediff_ext.pictures.skipped import SkipReport

SIZES = [(100, 80), (64, 64), (104, 80), (97, 73), (60, 64), (99, 80), (8, 8)]


def make(folder: Path) -> list[Path]:
    paths = []
    for index, size in enumerate(SIZES):
        path = folder / f"{index}.png"
        Image.new("RGB", size, (index, 0, 0)).save(path)
        paths.append(path)
    return paths


def indices(batches: list[tuple[grouping.LoadedPicture, ...]]) -> list[list[int]]:
    return [[loaded.planned.index for loaded in batch] for batch in batches]


def read_batches(
    group: Group, batch_size: int, *, report: SkipReport
) -> Iterator[tuple[grouping.LoadedPicture, ...]]:
    for planned in split_group(group, batch_size):
        if loaded := load_pictures(planned, report=report):
            yield loaded


def test_pictures_of_one_canvas_are_together(tmp_path: Path) -> None:
    planned = plan_pictures(make(tmp_path), OwnSize(), report=SkipReport())
    groups = group_by_canvas(planned)
    assert [(g.canvas_width_px, g.canvas_height_px) for g in groups] == [(104, 80), (64, 64)]
    assert [[p.index for p in g.pictures] for g in groups] == [[0, 2, 3, 5], [1, 4, 6]]


def test_batches_carry_canvases_and_map_back(tmp_path: Path) -> None:
    (group, small) = group_by_canvas(plan_pictures(make(tmp_path), OwnSize(), report=SkipReport()))
    batches = list(read_batches(group, 3, report=SkipReport()))
    assert indices(batches) == [[0, 2, 3], [5]]
    for batch in batches:
        for loaded in batch:
            assert loaded.canvas.size == (104, 80)
            assert loaded.picture.image.size == SIZES[loaded.planned.index]
            assert loaded.canvas.getpixel((103, 79)) == (loaded.planned.index, 0, 0)
    assert indices(list(read_batches(small, 8, report=SkipReport()))) == [[1, 4, 6]]


def test_pictures_are_read_when_their_batch_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_by_canvas(plan_pictures(make(tmp_path), OwnSize(), report=SkipReport()))[0]
    read: list[str] = []
    original = grouping.read_picture

    def noted(path: Path) -> object:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(grouping, "read_picture", noted)
    batches = read_batches(group, 2, report=SkipReport())
    assert read == []
    next(batches)
    assert read == ["0.png", "2.png"]


def test_a_header_that_is_broken_drops_out_and_numbers_stay(tmp_path: Path) -> None:
    paths = make(tmp_path)
    paths[0].write_bytes(b"x")
    report = SkipReport()
    planned = plan_pictures(paths, OwnSize(), report=report)
    assert [p.index for p in planned] == [1, 2, 3, 4, 5, 6]
    assert [entry.path for entry in report.skipped] == [paths[0]]


def test_a_picture_over_the_limit_drops_out(tmp_path: Path) -> None:
    report = SkipReport()
    planned = plan_pictures(make(tmp_path), OwnSize(), report=report, max_megapixels=0.005)
    assert [p.index for p in planned] == [1, 4, 6]
    assert "longest:" in report.skipped[0].reason


def test_a_picture_that_breaks_later_leaves_the_other_batches_as_they_are(tmp_path: Path) -> None:
    paths = make(tmp_path)
    group = group_by_canvas(plan_pictures(paths, OwnSize(), report=SkipReport()))[0]
    paths[2].write_bytes(paths[2].read_bytes()[:60])
    Image.new("RGB", (5, 5)).save(paths[3])
    report = SkipReport()
    assert indices(list(read_batches(group, 2, report=report))) == [[0], [5]]
    assert [entry.path for entry in report.skipped] == [paths[2], paths[3]]
    assert "changed" in report.skipped[1].reason


def test_a_group_of_broken_pictures_has_no_batch(tmp_path: Path) -> None:
    paths = make(tmp_path)
    group = group_by_canvas(plan_pictures(paths, OwnSize(), report=SkipReport()))[1]
    for path in paths:
        path.unlink()
    report = SkipReport()
    assert list(read_batches(group, 2, report=report)) == []
    assert len(report.skipped) == 3


def test_a_batch_needs_a_picture(tmp_path: Path) -> None:
    group = group_by_canvas(plan_pictures(make(tmp_path), OwnSize(), report=SkipReport()))[0]
    with pytest.raises(OptionError):
        split_group(group, 0)

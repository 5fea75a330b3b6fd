"""Timing and comparing the pictures of two processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.pictures import compare_pictures, picture_times, size_rows, start_up_s
from benchmarks.pipeline import compare_with_eager

TIMES = [("00-8x8-0", 10.0), ("00-8x8-1", 11.0), ("01-16x8-0", 14.0), ("01-16x8-1", 16.0)]


def test_times_are_those_of_the_files(tmp_path: Path) -> None:
    for name, seconds in reversed(TIMES):
        path = tmp_path / f"{name}.png"
        path.touch()
        os.utime(path, (1000 + seconds, 1000 + seconds))
    assert picture_times(tmp_path, 1000.0) == TIMES


def test_a_size_takes_the_time_between_its_files() -> None:
    rows = size_rows(TIMES)
    assert [(r["width"], r["height"], r["pictures"]) for r in rows] == [(8, 8, 1), (16, 8, 2)]
    assert [r["ms_mean"] for r in rows] == [1000.0, 2500.0]
    assert [r["ms_first"] for r in rows] == [1000.0, 3000.0]
    assert start_up_s(TIMES, rows) == 9.0


def test_one_picture_of_the_first_size_is_all_start_up() -> None:
    times = [TIMES[0], *TIMES[2:]]
    rows = size_rows(times)
    assert [(r["width"], r["pictures"]) for r in rows] == [(16, 2)]
    assert start_up_s(times, rows) == 10.0


def folder_of(path: Path, *values: int) -> Path:
    path.mkdir()
    for number, value in enumerate(values):
        image = Image.new("RGB", (8, 8), (value, value, value))
        image.paste((255, 255, 255), (0, 0, 8, 4))
        image.save(path / f"{number}.png")
    return path


def test_the_worst_picture_counts(tmp_path: Path) -> None:
    expected, found = folder_of(tmp_path / "a", 0, 0), folder_of(tmp_path / "b", 0, 10)
    same = compare_pictures(expected, expected)
    assert (same["pictures"], same["psnr_db_min"], same["mean_levels_max"]) == (2, 99.0, 0.0)
    worst = compare_pictures(expected, found)
    assert worst["mean_levels_max"] == 5.0
    assert worst["psnr_db_min"] == pytest.approx(31.1, abs=0.1)
    assert worst["contrast_levels_min"] == 127.5


def contender(wall_s: float) -> dict:
    run = {
        "wall_s": wall_s, "first_picture_s": 1.0, "start_up_s": 1.0,
        "pictures_per_minute": 60 / wall_s,
    }  # fmt: skip
    return {"runs": [run]}


def judged(tmp_path: Path, ours: int, allowed_psnr_db: float) -> dict:
    folder_of(tmp_path / "eager", 0)
    folder_of(tmp_path / "ours-filled-store", ours)
    figures = {
        "rows": [
            {"contender": "eager", "ms_mean": 30.0},
            {"contender": "ours-filled-store", "ms_mean": 10.0},
        ],
        "contenders": {"eager": contender(4.0), "ours-filled-store": contender(2.0)},
    }
    compare_with_eager(figures, tmp_path, {"eager", "ours-filled-store"}, allowed_psnr_db)
    return figures["contenders"]["ours-filled-store"]


def test_a_ratio_counts_whole_processes(tmp_path: Path) -> None:
    found = judged(tmp_path, 0, 35.0)
    assert (found["ratio"], found["ratio_without_start_up"]) == (2.0, 3.0)
    assert found["pictures_per_minute"] == 30.0


def test_no_ratio_without_eagers_pictures(tmp_path: Path) -> None:
    found = judged(tmp_path, 10, 35.0)
    assert found["parity"]["within_tolerance"] is False
    assert (found["ratio"], found["ratio_without_start_up"]) == (None, None)


def test_blank_pictures_prove_nothing(tmp_path: Path) -> None:
    found = judged(tmp_path, 255, 0.0)
    assert found["ratio"] == 2.0
    for path in tmp_path.rglob("*.png"):
        Image.new("RGB", (8, 8)).save(path)
    figures = {"rows": [], "contenders": {"eager": contender(4.0), "ours": contender(2.0)}}
    (tmp_path / "ours-filled-store").rename(tmp_path / "ours")
    compare_with_eager(figures, tmp_path, {"ours"}, 35.0)
    assert figures["contenders"]["ours"]["parity"]["psnr_db_min"] == 99.0
    assert figures["contenders"]["ours"]["ratio"] is None

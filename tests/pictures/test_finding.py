"""Finding pictures in files and folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.errors import PictureError
from onediff_ext.pictures.finding import find_pictures, natural_key
from onediff_ext.pictures.skipped import Report
from onediff_ext.pictures.writing import write_png


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def names(
    folder: Path, *inputs: Path, report: Report | None = None, **options: object
) -> list[str]:
    found = find_pictures(
        inputs or [folder],
        report=report if report is not None else Report(),
        **options,  # type: ignore[arg-type]
    )
    return [entry.path.relative_to(folder).as_posix() for entry in found]


def test_natural_order() -> None:
    assert sorted(["b", "a10", "a2", "A1", "a02", "10", "9"], key=natural_key) == (
        ["9", "10", "A1", "a02", "a2", "a10", "b"]
    )


def test_a_folder_in_natural_order(tmp_path: Path) -> None:
    touch(tmp_path, "10.png", "9.jpg", "A.JPEG", "b.webp", "sub/1.png")
    assert names(tmp_path) == ["9.jpg", "10.png", "A.JPEG", "b.webp"]


def test_subfolders_come_after_the_folders_own_pictures(tmp_path: Path) -> None:
    touch(tmp_path, "z.png", "s10/a.png", "s2/b.png", "s2/t/c.png")
    assert names(tmp_path, recursive=True) == ["z.png", "s2/b.png", "s2/t/c.png", "s10/a.png"]


def test_what_is_no_picture_is_reported_and_hidden_files_are_not(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "notes.txt", "README", ".hidden.png", ".thumbs/a.png", "x.png/in.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    report = Report()
    assert names(tmp_path, report=report, recursive=True) == ["a.png", "x.png/in.png"]
    reasons = {entry.path.name: entry.reason for entry in report.skipped}
    assert set(reasons) == {"notes.txt", "README", "x.png", "gone.png"}
    assert ".txt" in reasons["notes.txt"]
    assert "folder" in reasons["x.png"]


def test_a_given_file_is_taken_whatever_its_name(tmp_path: Path) -> None:
    touch(tmp_path, "photo.dat", ".hidden.png")
    inputs = [tmp_path / "photo.dat", tmp_path / ".hidden.png"]
    assert names(tmp_path, *inputs) == ["photo.dat", ".hidden.png"]


def test_each_picture_once_and_inputs_in_order(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "a/2.png", "b/3.png")
    (tmp_path / "b" / "link.png").symlink_to(tmp_path / "a" / "1.png")
    inputs = [tmp_path / "b", tmp_path / "a" / "2.png", tmp_path / "a", tmp_path / "a"]
    assert names(tmp_path, *inputs) == ["b/3.png", "b/link.png", "a/2.png"]


def test_the_root_tells_subfolders(tmp_path: Path) -> None:
    touch(tmp_path, "a/s/1.png")
    (found,) = find_pictures([tmp_path / "a"], report=Report(), recursive=True)
    assert found.path.relative_to(found.root).as_posix() == "s/1.png"


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert names(tmp_path, recursive=True) == ["a/1.png"]


def test_the_output_folder_is_not_entered(tmp_path: Path) -> None:
    touch(tmp_path, "1.png", "s/out/1.png", "output/2.png")
    output_dir = tmp_path / "s" / "out"
    assert names(tmp_path, recursive=True, output_dir=output_dir) == ["1.png", "output/2.png"]


def test_results_in_the_input_folder_are_not_taken_again(tmp_path: Path) -> None:
    touch(tmp_path, "photo.jpg")
    image = Image.new("RGB", (8, 8))
    image.save(tmp_path / "mine.png")
    write_png(tmp_path / "photo.png", image, infotext="", digest="d")
    write_png(tmp_path / "day" / "photo.png", image, infotext="", digest="d")
    report = Report()
    found = names(tmp_path, recursive=True, output_dir=tmp_path, report=report)
    assert found == ["mine.png", "photo.jpg"]
    assert "earlier run" in str(report)
    assert names(tmp_path) == ["mine.png", "photo.jpg", "photo.png"]


def test_an_input_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="There is no"):
        find_pictures([tmp_path / "nowhere"], report=Report())


def test_folders_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "1.png", "locked/2.png")
    scandir = os.scandir

    def refuse(folder: Path) -> object:
        if folder.name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    report = Report()
    assert names(tmp_path, recursive=True, report=report) == ["1.png"]
    assert report.as_json() == [
        {
            "input": str(tmp_path / "locked"),
            "reason": "The folder cannot be listed (Permission denied).",
        }
    ]
    with pytest.raises(PictureError, match="locked"):
        find_pictures([tmp_path / "locked"], report=Report())


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b", "\udcff"])
def test_a_name_that_no_file_can_have_is_no_input(tmp_path: Path, name: str) -> None:
    with pytest.raises(PictureError, match="There is no"):
        names(tmp_path, tmp_path / name)


def test_folders_that_are_nested_very_deeply_are_left_out(tmp_path: Path) -> None:
    folders = [tmp_path]
    for _ in range(130):
        folders.append(folders[-1] / "d")
        folders[-1].mkdir()
        (folders[-1] / "a.png").touch()
    report = Report()
    found = find_pictures([tmp_path], report=report, recursive=True)
    assert [picture.path.parent for picture in found] == folders[1:101]
    (failure,) = report.failures
    assert failure.path == folders[101]
    assert "100 folders deep" in str(failure)

"""Results in files of their own, beside other processes that write the same names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.pictures import writing
from onediff_ext.pictures.new_files import write_new_png
from tests.support.sample_pictures import infotext_of

_IMAGE = Image.new("RGB", (8, 8))


def test_a_file_of_another_run_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    first = write_new_png(path, _IMAGE, infotext="first", digest="run1-0")
    second = write_new_png(path, _IMAGE, infotext="second", digest="run2-0")
    assert [first.name, second.name] == ["a.png", "a-2.png"]
    assert [infotext_of(first), infotext_of(second)] == ["first", "second"]


def test_a_file_of_this_run_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_new_png(path, _IMAGE, infotext="other", digest="run1-0")
    written = [write_new_png(path, _IMAGE, infotext="ours", digest="run2-0") for _ in range(2)]
    assert [found.name for found in written] == ["a-2.png", "a-2.png"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a-2.png", "a.png"]


@pytest.mark.skipif(os.name == "nt", reason="Windows lets few users make links")
def test_a_link_that_leads_nowhere_is_no_free_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to(tmp_path / "gone")
    written = write_new_png(tmp_path / "a.png", _IMAGE, infotext="ours", digest="")
    assert written.name == "a-2.png"


@pytest.mark.parametrize("has_links", [True, False])
def test_two_runs_that_write_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    path = tmp_path / "a.png"
    fsync, others = os.fsync, ["other"]

    def other_run_writes(descriptor: int) -> None:
        if others:
            writing.write_png(path, _IMAGE, infotext=others.pop(), digest="run1-0")
        fsync(descriptor)

    def no_links(*_paths: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "fsync", other_run_writes)
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    ours = write_new_png(path, _IMAGE, infotext="ours", digest="run2-0")
    assert [infotext_of(path), infotext_of(ours)] == ["other", "ours"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a-2.png", "a.png"]

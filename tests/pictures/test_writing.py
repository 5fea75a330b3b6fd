"""Writing results: complete or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.errors import PictureError
from onediff_ext.pictures.batch.resume import is_done
from onediff_ext.pictures.png_chunks import (
    read_png,
)
from onediff_ext.pictures.writing import write_png

IMAGE = Image.effect_noise((80, 60), 60).convert("RGB")


def write(path: Path, digest: str = "d1", infotext: str = "a cat\nSteps: 1") -> None:
    write_png(path, IMAGE, infotext=infotext, digest=digest)


@pytest.mark.parametrize("infotext", ["a cat\nSteps: 1", "café", "猫, 水彩\nSteps: 1", ""])
def test_a_result_carries_its_texts(tmp_path: Path, infotext: str) -> None:
    path = tmp_path / "new" / "sub" / "a.png"
    write(path, infotext=infotext)
    with Image.open(path) as image:
        assert image.convert("RGB").tobytes() == IMAGE.tobytes()
        assert image.info["parameters"] == infotext
    chunks = read_png(path)
    assert chunks.texts == {"parameters": infotext, "onediff_job": "d1"}
    assert chunks.is_complete
    assert [entry.name for entry in path.parent.iterdir()] == ["a.png"]


def test_texts_that_no_file_can_hold_do_not_stop_the_write(tmp_path: Path) -> None:
    write(tmp_path / "a.png", infotext="a\udcffb\0c")
    assert read_png(tmp_path / "a.png").texts["parameters"] == "a?bc"


def test_alpha_is_written(tmp_path: Path) -> None:
    alpha = Image.new("L", IMAGE.size, 77)
    write_png(tmp_path / "a.png", IMAGE, infotext="", digest="d", alpha=alpha)
    with Image.open(tmp_path / "a.png") as image:
        assert image.getchannel("A").tobytes() == alpha.tobytes()
    assert IMAGE.mode == "RGB"


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_others_may_read_the_result_as_any_new_file(tmp_path: Path) -> None:
    write(tmp_path / "a.png")
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.png").stat().st_mode == (tmp_path / "plain").stat().st_mode


def _raiser(error: BaseException) -> Callable[..., object]:
    def raise_it(*_args: object, **_kwargs: object) -> object:
        raise error

    return raise_it


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
        (errno.EIO, "Check the disk"),
    ],
)
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, hint: str
) -> None:
    path = tmp_path / "a.png"
    write(path, "old")
    with monkeypatch.context() as patched:
        patched.setattr(os, step, _raiser(OSError(number, os.strerror(number))))
        with pytest.raises(PictureError, match=hint):
            write(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.png"]
    assert is_done(path, "old")


def test_a_write_that_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _raiser(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PictureError, match="where a folder should"):
        write(tmp_path / "file" / "a.png")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(PictureError, match="folder stands"):
        write(tmp_path / "a.png")
    with pytest.raises(PictureError, match="shorter"):
        write(tmp_path / ("x" * 300 + ".png"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.png", "file"]

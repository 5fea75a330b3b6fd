"""Results that exist already, and the digests that tell them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.core.errors import OptionError, PictureError, UnsafeFileError
from onediff_ext.pictures import png_chunks
from onediff_ext.pictures.batch.resume import Output, is_done, job_digest, plan_outputs
from onediff_ext.pictures.new_files import write_new_png
from onediff_ext.pictures.picture_header import PictureHeader
from onediff_ext.pictures.png_chunks import (
    read_png,
)
from onediff_ext.pictures.writing import write_png

IMAGE = Image.effect_noise((80, 60), 60).convert("RGB")

HEADER = PictureHeader(Path("in/a.jpg"), 80, 60, "JPEG", "RGB", 1234, 5678)


def write(path: Path, digest: str = "d1", infotext: str = "a cat\nSteps: 1") -> None:
    write_png(path, IMAGE, infotext=infotext, digest=digest)


def _raiser(error: BaseException) -> Callable[..., object]:
    def raise_it(*_args: object, **_kwargs: object) -> object:
        raise error

    return raise_it


def test_a_result_is_done_only_when_whole_and_of_the_same_job(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    assert not is_done(path, "d1")
    write(path, "d1")
    assert is_done(path, "d1")
    assert not is_done(path, "d2")
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        assert not is_done(path, "d1")
    path.write_bytes(whole[:-1])
    assert not is_done(path, "d1")
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert not is_done(path, "d1")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_what_is_no_file_is_nothing_of_ours_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to("/dev/zero")
    for name in ("a.png", "b.png"):
        with pytest.raises(UnsafeFileError):
            read_png(tmp_path / name)
        (output,) = plan_outputs(tmp_path, [name], ["d1"])
        assert not output.is_done
        assert output.path.name == f"{name[0]}-2.png"


SETTINGS: dict[str, object] = {
    "prompt": "a cat",
    "seed": 1,
    "strength": 0.6,
    "loras": [("a", 0.5)],
    "model": Path("models/sd.safetensors"),
    "upscale": None,
    "nested": {"x": True},
}


def test_golden_digest() -> None:
    assert job_digest(SETTINGS, HEADER) == (
        "ce4e88c62bf7c2dfbfcb408e94f3b5e9d0614c7bbe614661307244bb15ccf5e2"
    )


@pytest.mark.parametrize(
    "changed",
    [{"prompt": "a dog"}, {"seed": 2}, {"seed": "1"}, {"nested": {"x": False}}, {"new": None}],
)
def test_settings_change_the_digest(changed: dict[str, object]) -> None:
    assert job_digest({**SETTINGS, **changed}, HEADER) != job_digest(SETTINGS, HEADER)


@pytest.mark.parametrize(
    "changed",
    [{"path": Path("in/b.jpg")}, {"size_bytes": 1}, {"modified_ns": 1}, {"width_px": 1}],
)
def test_the_input_changes_the_digest(changed: dict[str, object]) -> None:
    changed_facts = replace(HEADER, **changed)  # type: ignore[arg-type]
    assert job_digest(SETTINGS, changed_facts) != job_digest(SETTINGS, HEADER)


def test_order_and_folder_do_not_change_the_digest() -> None:
    moved = replace(HEADER, path=Path("elsewhere/a.jpg"))
    backwards = dict(reversed(SETTINGS.items()))
    assert job_digest(backwards, moved) == job_digest(SETTINGS, HEADER)


@pytest.mark.parametrize("value", [object(), float("nan"), b"x", {1, 2}, [object()]])
def test_a_setting_that_has_no_stable_text_is_refused(value: object) -> None:
    with pytest.raises(OptionError, match='"odd"'):
        job_digest({"odd": value}, HEADER)


def test_outputs_are_done_redone_or_moved_aside(tmp_path: Path) -> None:
    write(tmp_path / "done.png", "d0")
    write(tmp_path / "other-job.png", "old")
    IMAGE.save(tmp_path / "foreign.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "empty.png").touch()
    names = ["done", "other-job", "foreign", "folder", "empty", "new"]
    outputs = plan_outputs(
        tmp_path, [f"{name}.png" for name in names], [f"d{index}" for index in range(6)]
    )
    assert [(output.path.name, output.is_done) for output in outputs] == [
        ("done.png", True),
        ("other-job.png", False),
        ("foreign-2.png", False),
        ("folder-2.png", False),
        ("empty-2.png", False),
        ("new.png", False),
    ]


@pytest.mark.parametrize("digest", ["", "d1"])
def test_a_picture_that_no_folder_was_drawn_to_keeps_its_name(tmp_path: Path, digest: str) -> None:
    """`txt2img` and the page's drawing tabs share their default folder with `img2img`."""
    write_new_png(tmp_path / "a.png", IMAGE, infotext="a fox", digest=digest)
    write(tmp_path / "b.png", digest="")  # as 0.2.0 wrote them
    outputs = plan_outputs(tmp_path, ["a.png", "b.png"], ["d1", "d2"])
    assert [(output.path.name, output.is_done) for output in outputs] == [
        ("a-2.png", False),
        ("b-2.png", False),
    ]


def test_a_run_that_moved_aside_goes_on_there(tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "a.png")
    for _ in range(2):
        (output,) = plan_outputs(tmp_path, ["a.png"], ["d"])
        assert output.path.name == "a-2.png"
        write(output.path, "d")
    assert plan_outputs(tmp_path, ["a.png"], ["d"]) == [Output(tmp_path / "a-2.png", True)]


def test_moving_aside_takes_no_name_that_another_result_has(tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "a.png")
    outputs = plan_outputs(tmp_path, ["a.png", "a-2.png"], ["d", "e"])
    assert [output.path.name for output in outputs] == ["a-3.png", "a-2.png"]


def test_an_input_is_never_written_to_even_when_we_made_it(tmp_path: Path) -> None:
    write(tmp_path / "a.png", "old")
    (output,) = plan_outputs(tmp_path, ["a.png"], ["new"], inputs=[tmp_path / "a.png"])
    assert output.path.name == "a-2.png"


def test_a_result_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    write(tmp_path / "a.png", "d")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[:-20])
    assert plan_outputs(tmp_path, ["a.png"], ["d"]) == [Output(tmp_path / "a.png", False)]


def test_an_output_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.png")
    refused = _raiser(PermissionError(13, "Permission denied"))
    monkeypatch.setattr(png_chunks, "open_file", refused)
    with pytest.raises(PictureError, match="cannot be read"):
        is_done(tmp_path / "a.png", "d")


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    (output,) = plan_outputs(tmp_path / "x" / "y", ["a.png"], ["d"])
    write(output.path, "d")
    assert is_done(output.path, "d")
    shutil.rmtree(tmp_path / "x")
    assert not is_done(output.path, "d")

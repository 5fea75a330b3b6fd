"""Writing results, and going on after a stop."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from onediff_ext.core.errors import OptionError, PictureError, UnsafeFileError
from onediff_ext.pictures import png_chunks
from onediff_ext.pictures.picture_header import PictureHeader
from onediff_ext.pictures.png_chunks import (
    MAX_ALL_TEXTS_BYTES,
    MAX_TEXT_BYTES,
    PngChunks,
    read_png,
)
from onediff_ext.pictures.resume import Output, is_done, job_digest, plan_outputs
from onediff_ext.pictures.writing import write_png

IMAGE = Image.effect_noise((80, 60), 60).convert("RGB")
FACTS = PictureHeader(Path("in/a.jpg"), 80, 60, "JPEG", "RGB", 1234, 5678)


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


def test_chunks_of_what_is_no_png(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"GIF89a")
    assert read_png(path) == PngChunks()


def test_compressed_texts_are_read_and_damaged_ones_passed_over(tmp_path: Path) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("packed", "xyz" * 100, zip=True)
    info.add_itxt("wide", "猫" * 50, zip=True)
    info.add_text("broken", "broken text")
    info.add(b"zTXt", b"bad\0\0no zlib")
    IMAGE.save(tmp_path / "a.png", pnginfo=info)
    damaged = (tmp_path / "a.png").read_bytes().replace(b"broken text", b"brOken text")
    (tmp_path / "a.png").write_bytes(damaged)
    assert read_png(tmp_path / "a.png").texts == {"packed": "xyz" * 100, "wide": "猫" * 50}


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _png(*chunks: bytes) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    pixels = _chunk(b"IDAT", zlib.compress(b"\0\0"))
    return b"\x89PNG\r\n\x1a\n" + b"".join([header, *chunks, pixels, _chunk(b"IEND", b"")])


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"tEXt"])
def test_all_texts_together_have_a_limit(tmp_path: Path, kind: bytes) -> None:
    packed = zlib.compress(bytes(MAX_TEXT_BYTES - 1), 9)
    rest = {b"zTXt": b"\0" + packed, b"iTXt": b"\1\0\0\0" + packed, b"tEXt": bytes(2**20)}[kind]
    chunks = [_chunk(kind, b"key %d\0" % number + rest) for number in range(100)]
    ours = _chunk(b"tEXt", b"onediff_job\0d1")
    (tmp_path / "a.png").write_bytes(_png(ours, *chunks))
    tracemalloc.start()
    try:
        found = read_png(tmp_path / "a.png")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5 * MAX_ALL_TEXTS_BYTES
    assert sum(map(len, found.texts.values())) <= MAX_ALL_TEXTS_BYTES
    assert found.texts["onediff_job"] == "d1"
    assert found.is_complete


def test_a_text_over_the_limit_is_passed_over(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(MAX_TEXT_BYTES + 1), 9)
    chunks = [_chunk(b"zTXt", b"big\0\0" + bomb), _chunk(b"tEXt", b"small\0text")]
    (tmp_path / "a.png").write_bytes(_png(*chunks))
    assert read_png(tmp_path / "a.png").texts == {"small": "text"}


def test_chunks_without_end_are_not_walked_for_ever(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(_png(*[_chunk(b"teSt", b"")] * 600_000))
    start = time.process_time()
    assert not read_png(tmp_path / "a.png").is_complete
    assert time.process_time() - start < 10


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
    assert job_digest(SETTINGS, FACTS) == (
        "ce4e88c62bf7c2dfbfcb408e94f3b5e9d0614c7bbe614661307244bb15ccf5e2"
    )


@pytest.mark.parametrize(
    "changed",
    [{"prompt": "a dog"}, {"seed": 2}, {"seed": "1"}, {"nested": {"x": False}}, {"new": None}],
)
def test_settings_change_the_digest(changed: dict[str, object]) -> None:
    assert job_digest({**SETTINGS, **changed}, FACTS) != job_digest(SETTINGS, FACTS)


@pytest.mark.parametrize(
    "changed",
    [{"path": Path("in/b.jpg")}, {"size_bytes": 1}, {"modified_ns": 1}, {"width_px": 1}],
)
def test_the_input_changes_the_digest(changed: dict[str, object]) -> None:
    changed_facts = replace(FACTS, **changed)  # type: ignore[arg-type]
    assert job_digest(SETTINGS, changed_facts) != job_digest(SETTINGS, FACTS)


def test_order_and_folder_do_not_change_the_digest() -> None:
    moved = replace(FACTS, path=Path("elsewhere/a.jpg"))
    backwards = dict(reversed(SETTINGS.items()))
    assert job_digest(backwards, moved) == job_digest(SETTINGS, FACTS)


@pytest.mark.parametrize("value", [object(), float("nan"), b"x", {1, 2}, [object()]])
def test_a_setting_that_has_no_stable_text_is_refused(value: object) -> None:
    with pytest.raises(OptionError, match='"odd"'):
        job_digest({"odd": value}, FACTS)


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
    monkeypatch.setattr(png_chunks, "open_regular", refused)
    with pytest.raises(PictureError, match="cannot be read"):
        is_done(tmp_path / "a.png", "d")


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    (output,) = plan_outputs(tmp_path / "x" / "y", ["a.png"], ["d"])
    write(output.path, "d")
    assert is_done(output.path, "d")
    shutil.rmtree(tmp_path / "x")
    assert not is_done(output.path, "d")

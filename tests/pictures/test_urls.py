"""Pictures at URLs are found, read, written and gone on with like those of a folder."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from onediff_ext.core.errors import OptionError, PictureError
from onediff_ext.pictures.batch.batch_drawer import (
    BatchDrawer,
    BatchToDraw,
    DrawnBatch,
    DrawnPicture,
)
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.batch.planning import Plan, plan_batch
from onediff_ext.pictures.batch.run_batches import run_batches
from onediff_ext.pictures.finding import find_pictures
from onediff_ext.pictures.naming import free_path
from onediff_ext.pictures.size_rules import parse_size_rule
from onediff_ext.pictures.skipped import SkipReport
from onediff_ext.pictures.urls import files_below, is_url, parse_path
from onediff_ext.pictures.writing import make_folder, remove_unfinished, unfinished_names, write_png
from tests.support.sample_pictures import gradient

pytestmark = pytest.mark.filterwarnings("ignore:UPath 'shelf' filesystem:UserWarning")


class Shelf(MemoryFileSystem):
    """A server on which half a file can be seen, and whose rename replaces nothing."""

    protocol = "shelf"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fails_at = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("shelf://"))

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        super().pipe_file(path, value[: len(value) // 2])
        if self.fails_at == "write":
            raise ConnectionAbortedError("the line is cut")
        super().pipe_file(path, value)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2)


@pytest.fixture(params=["memory", "shelf"])
def root(request: pytest.FixtureRequest) -> Path:
    """An empty place at a URL: an object store, and a server with folders."""
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    for files in (MemoryFileSystem, Shelf):
        files.store.clear()
        files.pseudo_dirs[:] = [""]
    Shelf.fails_at = ""
    return parse_path(f"{request.param}://bucket")


def put(folder: Path, name: str, width: int = 8, height: int = 8) -> Path:
    """Write a picture."""
    buffer = io.BytesIO()
    gradient(width, height).save(buffer, "PNG")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return path


class Negative(BatchDrawer[None]):
    """Draws the negative of each picture."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def draw(self, batch: BatchToDraw) -> list[DrawnBatch[None]]:
        self.drawn += [source.planned.header.path.name for source in batch.pictures]
        made = [
            DrawnPicture(source, source.canvas.point(lambda value: 255 - value), "made here")
            for source in batch.pictures
        ]
        return [DrawnBatch(made, None)]


def plan_and_draw(job: BatchJob, report: SkipReport) -> tuple[Plan, list[str]]:
    plan, drawer = plan_batch(job, lambda _: {}, report), Negative()
    plan.make_folders()
    run_batches(job, plan, drawer, report)
    return plan, drawer.drawn


def job_of(root: Path, **options: Any) -> BatchJob:
    return BatchJob(
        **{
            "inputs": [root / "in"],
            "output_dir": root / "out",
            "size_rule": parse_size_rule("own"),
            "seed": 1,
            **options,
        }
    )


def test_pictures_of_a_url_are_found_as_in_a_folder(root: Path) -> None:
    names = ("10.png", "2.png", "sub/3.png", ".hidden.png", "notes.txt", "2.txt", "out/4.png")
    for name in names:
        put(root / "in", name)
    report = SkipReport()
    search = {"report": report, "output_dir": root / "in" / "out"}
    found = find_pictures([root / "in"], **search)
    assert [str(each.path) for each in found] == [f"{root}/in/2.png", f"{root}/in/10.png"]
    assert [entry.path.name for entry in report.skipped] == ["notes.txt"]
    found = find_pictures([root / "in", root / "in" / "2.png"], recursive=True, **search)
    assert [each.path.relative_to(each.root).as_posix() for each in found] == [
        *("2.png", "10.png", "sub/3.png"),
    ]
    with pytest.raises(PictureError, match=r"There is no .*nowhere"):
        find_pictures([root / "nowhere"], report=report)


def test_a_run_goes_on_where_it_stopped(root: Path) -> None:
    for number, width in enumerate((8, 128, 8, 8)):
        put(root / "in", f"{number}.png", width)
    (root / "in" / "9.png").write_bytes(b"no picture")
    (root / "in" / "0.txt").write_text("a fox")
    report = SkipReport()
    job = job_of(root, captions=True, batch_size=2, name_template=job_of(root).name_template)
    plan, drawn = plan_and_draw(job, report)
    assert [one.planned.caption for one in plan.todo] == ["a fox", None, None, None]
    assert drawn == ["0.png", "2.png", "3.png", "1.png"]
    assert [(entry.path.name, entry.is_failure) for entry in report.skipped] == [("9.png", True)]
    for number, width in enumerate((8, 128, 8, 8)):
        with (root / "out" / f"{number}.png").open("rb") as stream, Image.open(stream) as image:
            assert image.tobytes() == gradient(width, 8).point(lambda v: 255 - v).tobytes()
            assert image.text["parameters"] == "made here"
    assert {path.name for path in (root / "out").iterdir()} == {f"{n}.png" for n in range(4)}

    (root / "out" / "2.png").unlink()
    put(root / "in", "3.png", 136)  # another picture of that name
    plan, drawn = plan_and_draw(job, SkipReport())
    assert drawn == ["2.png", "3.png"]
    assert {path.name for path in plan.already_done} == {"0.png", "1.png"}
    assert plan_and_draw(job, SkipReport())[1] == []


def test_results_replace_no_file_of_others(root: Path) -> None:
    put(root / "in", "a.png")
    before = put(root / "out", "a.png").read_bytes()
    _, drawn = plan_and_draw(job_of(root), SkipReport())
    assert drawn == ["a.png"]
    assert (root / "out" / "a.png").read_bytes() == before
    assert {path.name for path in (root / "out").iterdir()} == {"a.png", "a-2.png"}
    assert free_path(root / "out" / "a.png") == root / "out" / "a-3.png"


def test_between_a_url_and_a_folder(root: Path, tmp_path: Path) -> None:
    put(root / "in", "a.png")
    plan_and_draw(job_of(root, output_dir=tmp_path), SkipReport())
    assert os.listdir(tmp_path) == ["a.png"]
    plan_and_draw(job_of(root, inputs=[tmp_path]), SkipReport())
    assert [path.name for path in (root / "out").iterdir()] == ["a.png"]


def test_nothing_half_written_is_there(root: Path) -> None:
    image = gradient(64, 64)
    write_png(root / "a.png", image, infotext="first", digest="d")
    if Shelf.protocol == root.protocol:
        before, Shelf.fails_at = (root / "a.png").read_bytes(), "write"
        with pytest.raises(PictureError, match=r"a\.png cannot be written .*the line is cut"):
            write_png(root / "a.png", image, infotext="second", digest="d")
        with pytest.raises(PictureError, match="bucket cannot be written"):
            make_folder(root)
        assert (root / "a.png").read_bytes() == before
        Shelf.fails_at = ""
    write_png(root / "a.png", image, infotext="third", digest="d")
    with (root / "a.png").open("rb") as stream, Image.open(stream) as written:
        assert written.text["parameters"] == "third"
    assert [path.name for path in root.iterdir()] == ["a.png"]


def test_partial_files_of_a_run_are_deleted(root: Path) -> None:
    for name in (".0a1b2c3d00000000.tmp", ".ffffffff00000000.tmp", ".0a1b2c3d.tmp"):
        (root / "out").mkdir(parents=True, exist_ok=True)
        (root / "out" / name).write_bytes(b"half")
    assert remove_unfinished(root / "out", "0a1b2c3d") == 1
    assert remove_unfinished(root / "nowhere", "0a1b2c3d") == 0
    left = {path.name for path in (root / "out").iterdir()}
    assert left == {".ffffffff00000000.tmp", ".0a1b2c3d.tmp"}
    assert unfinished_names.run == ""


def test_requests_that_fail_say_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root / "in", "a.png")

    class ServerError(Exception):
        pass

    def fail(*_: Any, **__: Any) -> Any:
        raise ServerError("503: slow down")

    for method, stage in (("info", "reached"), ("ls", "listed"), ("find", "listed")):
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, method, fail)
            with pytest.raises(PictureError, match=rf"cannot be {stage}.*503: slow down"):
                plan_batch(job_of(root), lambda _: {}, SkipReport())
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "exists", fail)
        with pytest.raises(PictureError, match=r"cannot be reached.*503: slow down"):
            free_path(root / "out" / "a.png")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "_open", fail)
        report = SkipReport()
        assert plan_batch(job_of(root), lambda _: {}, report).todo == []
        assert "503: slow down" in report.failures[0].reason


def test_a_line_that_is_cut_while_a_file_is_read_costs_this_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root / "in", "a.png")
    put(root / "in", "b.png")
    (root / "in" / "a.txt").write_text("a fox")
    plan_and_draw(job_of(root), SkipReport())
    opened = MemoryFileSystem._open

    def cut(files: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        def read(*_: Any) -> bytes:
            raise EOFError("the line is cut")  # no OSError, as of many packages

        stream = opened(files, path, *args, **kwargs)
        if not path.endswith(ending):
            return stream
        return SimpleNamespace(read=read, seek=stream.seek, tell=stream.tell, close=stream.close)

    monkeypatch.setattr(MemoryFileSystem, "_open", cut)
    ending, report = "/in/a.png", SkipReport()
    assert plan_batch(job_of(root), lambda _: {}, report).todo == []
    assert "the line is cut" in report.failures[0].reason
    ending, report = "/in/a.txt", SkipReport()
    plan_batch(job_of(root, captions=True), lambda _: {}, report)
    assert "caption" in report.failures[0].reason
    ending = "/out/a.png"
    with pytest.raises(PictureError, match=r"there and cannot be read.*the line is cut"):
        plan_batch(job_of(root), lambda _: {}, SkipReport())


def test_the_folder_is_listed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for each of a hundred thousand results takes an hour."""
    for number in range(20):
        put(root / "in", f"{number}.png")
    asked: list[str] = []
    for method in ("info", "ls", "find"):
        original = getattr(MemoryFileSystem, method)

        def noted(files: Any, path: str, *args: Any, _f: Any = original, **kwargs: Any) -> Any:
            asked.append(path)
            return _f(files, path, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, method, noted)
    plan_batch(job_of(root), lambda _: {}, SkipReport())
    assert not [path for path in asked if "/out/" in path]


def test_which_texts_are_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("holiday", "a/b.png", str(tmp_path), r"C:\photos"):
        assert parse_path(text) == Path(text)
    assert parse_path(tmp_path.as_uri()) == tmp_path
    assert is_url(parse_path("memory://bucket"))
    assert files_below(tmp_path) is None
    with pytest.raises(OptionError, match="nope://bucket cannot be opened"):
        parse_path("nope://bucket")
    (tmp_path / "no.zip").write_bytes(b"no archive")
    with pytest.raises(OptionError, match=r"cannot be opened \(File is not a zip file"):
        parse_path(f"zip://photos::{tmp_path / 'no.zip'}")
    monkeypatch.setitem(__import__("sys").modules, "upath", None)
    with pytest.raises(OptionError, match="universal_pathlib") as raised:
        parse_path("s3://bucket")
    assert "onediff-ext[cluster]" in raised.value.hint

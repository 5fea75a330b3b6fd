"""The loop of a run, with a drawer that inverts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from onediff_ext.core.errors import OptionError, PictureError
from onediff_ext.pictures.batch import run_batches as module
from onediff_ext.pictures.batch.batch_job import MAX_BATCH_SIZE, BatchJob
from onediff_ext.pictures.batch.planning import Plan, plan_batch
from onediff_ext.pictures.batch.run_batches import batch_count, run_batches
from onediff_ext.pictures.png_chunks import INFOTEXT_KEYWORD, read_png
from onediff_ext.pictures.size_rules import OwnSize
from onediff_ext.pictures.skipped import SkipReport
from onediff_ext.pictures.writing import write_png
from tests.support.batch_drawers import InvertingDrawer
from tests.support.sample_pictures import save_pictures


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    """Five images of two canvas sizes, two at once."""
    folder = save_pictures(
        tmp_path / "in", a=(66, 64), b=(64, 96), c=(72, 64), d=(70, 62), e=(64, 90)
    )
    return BatchJob([folder], tmp_path / "out", OwnSize(), seed=3, batch_size=2)


def plan(job: BatchJob, report: SkipReport | None = None) -> Plan:
    return plan_batch(job, lambda one: {"prompt": "a cat"}, report or SkipReport())


def test_images_of_one_canvas_are_drawn_together_and_written_in_their_own_size(
    job: BatchJob,
) -> None:
    drawer, report = InvertingDrawer(), SkipReport()
    planned = plan(job, report)
    run_batches(job, planned, drawer, report)
    assert drawer.drawn == [
        (1, (72, 64), ["a.png", "c.png"]),
        (2, (72, 64), ["d.png"]),
        (3, (64, 96), ["b.png", "e.png"]),
    ]
    assert batch_count(job, planned) == 3
    assert [number for number, _ in drawer.batches_written] == [1, 2, 3]
    assert [p.path.name for _, p in drawer.written] == ["a.png", "c.png", "d.png", "b.png", "e.png"]
    for _, picture in drawer.written:
        source = Image.open(picture.planned.header.path)
        with Image.open(picture.path) as result:
            assert result.size == source.size == picture.image.size
        text = read_png(picture.path).texts[INFOTEXT_KEYWORD]
        assert text == picture.infotext == f"a cat {picture.planned.index}"
    assert report.skipped == []


def test_parts_of_a_batch_are_written_as_they_are_drawn(job: BatchJob) -> None:
    drawer = InvertingDrawer(part_size=1)
    run_batches(job, plan(job), drawer, SkipReport())
    assert [len(paths) for _, paths in drawer.batches_written] == [1] * 5
    assert plan(job).todo == []


def test_an_image_that_cannot_be_drawn_leaves_the_others_alone(job: BatchJob) -> None:
    drawer, report = InvertingDrawer(failing=("c.png",)), SkipReport()
    run_batches(job, plan(job), drawer, report)
    assert [entry.path.name for entry in report.failures] == ["c.png"]
    assert [len(paths) for _, paths in drawer.batches_written] == [1, 1, 2]
    assert [result.path.name for result in plan(job).todo] == ["c.png"]


def test_a_stopped_run_goes_on_with_the_next_batch(job: BatchJob) -> None:
    answers = iter([False, True])
    first = InvertingDrawer(is_stopped=lambda: next(answers))
    run_batches(job, plan(job), first, SkipReport())
    assert [number for number, _, _ in first.drawn] == [1]
    rest = plan(job)
    assert [path.name for path in rest.already_done] == ["a.png", "c.png"]
    second = InvertingDrawer()
    run_batches(job, rest, second, SkipReport())
    assert [names for _, _, names in second.drawn] == [["b.png", "e.png"], ["d.png"]]


def test_results_before_a_full_disk_are_kept_and_told(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, *arguments: Any, **named: Any) -> None:
        if path.name == "c.png":
            raise PictureError("The disk is full.")
        write_png(path, *arguments, **named)

    monkeypatch.setattr(module, "write_png", write)
    drawer = InvertingDrawer()
    with pytest.raises(PictureError, match="full"):
        run_batches(job, plan(job), drawer, SkipReport())
    assert [picture.path.name for _, picture in drawer.written] == ["a.png"]
    assert drawer.batches_written == []


@pytest.mark.parametrize("batch_size", [-1, 0, MAX_BATCH_SIZE + 1])
def test_a_batch_size_out_of_range_is_refused(tmp_path: Path, batch_size: int) -> None:
    with pytest.raises(OptionError, match=str(MAX_BATCH_SIZE)):
        BatchJob([tmp_path], tmp_path, OwnSize(), seed=0, batch_size=batch_size)

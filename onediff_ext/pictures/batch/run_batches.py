"""The loop of a run: batches are read ahead, drawn by the host, and written behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from onediff_ext.core.errors import PictureError
from onediff_ext.pictures.batch.background_io import BackgroundWriter, read_ahead
from onediff_ext.pictures.batch.batch_drawer import (
    BatchDrawer,
    BatchToDraw,
    DrawerLostError,
    DrawnBatch,
    DrawnPicture,
    FurtherDrawer,
    HostResultT,
    WrittenPicture,
)
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.batch.grouping import group_by_canvas, load_pictures, split_group
from onediff_ext.pictures.batch.planning import Plan, PlannedResult
from onediff_ext.pictures.batch.shared_batches import SharedBatches
from onediff_ext.pictures.canvas_images import from_canvas, to_target
from onediff_ext.pictures.skipped import SkipReport
from onediff_ext.pictures.writing import write_png


def run_batches(
    job: BatchJob,
    plan: Plan,
    drawer: BatchDrawer[HostResultT],
    report: SkipReport,
    further: Sequence[FurtherDrawer[HostResultT]] = (),
) -> None:
    """Draw the results that are still missing.

    One thread reads the next batch and one writes the last one while the host draws. An image
    that fails goes to the report and leaves the others alone.

    Args:
        job: What to do.
        plan: From `planning.plan_batch`.
        drawer: Draws, in this thread.
        report: Gets the images that are left out.
        further: Draw beside it. What one of them cannot draw, the others do.

    Raises:
        PictureError: A result cannot be written, for example because the disk is full. Written
            results stay, and the same job goes on there.
    """
    targets = {result.planned.index: result for result in plan.todo}
    with (
        BackgroundWriter() as writing,
        closing(read_ahead(_read(job, plan, drawer, report))) as read,
    ):
        batches, lock = SharedBatches(read), threading.Lock()

        def draw_all(one: BatchDrawer[HostResultT]) -> None:
            while (batch := batches.take()) is not None:
                if one.is_stopped():
                    batches.close()
                    return
                try:
                    for drawn in one.draw(batch):
                        with lock:
                            writing.put(partial(write_batch, job, targets, one, drawn, report))
                except DrawerLostError:
                    batches.give_back(batch)
                    raise
                batches.done()

        def draw_beside(one: FurtherDrawer[HostResultT]) -> None:
            try:
                if one.open(lambda: not batches.is_over):
                    draw_all(one)
            except DrawerLostError as exc:
                one.on_lost(exc)
            finally:
                one.close()

        with ThreadPoolExecutor(max(1, len(further)), "onediff-further") as threads:
            beside = [threads.submit(draw_beside, one) for one in further]
            for thread in beside:
                thread.add_done_callback(lambda done: batches.close() if done.exception() else None)
            try:
                draw_all(drawer)
            finally:
                batches.close()
        for thread in beside:
            thread.result()


def batch_count(job: BatchJob, plan: Plan) -> int:
    """Return how many batches a run draws if every image can be read."""
    groups = group_by_canvas([result.planned for result in plan.todo])
    return sum(-(-len(group.pictures) // job.batch_size) for group in groups)


def _read(
    job: BatchJob, plan: Plan, drawer: BatchDrawer[HostResultT], report: SkipReport
) -> Iterator[BatchToDraw]:
    number = 0
    for group in group_by_canvas([result.planned for result in plan.todo]):
        for planned in split_group(group, job.batch_size):
            pictures = load_pictures(planned, report=report)
            if not pictures:
                continue
            number += 1
            prepared = drawer.prepare([loaded.canvas for loaded in pictures])
            yield BatchToDraw(number, pictures, prepared)


def write_batch(
    job: BatchJob,
    targets: Mapping[int, PlannedResult],
    drawer: BatchDrawer[HostResultT],
    drawn: DrawnBatch[HostResultT],
    report: SkipReport,
) -> None:
    """Write the results of a drawn batch, and tell the drawer.

    Args:
        job: What to do.
        targets: Index of an image → its result. Images without one are not written.
        drawer: Drew the batch.
        drawn: The batch, or a part of it.
        report: Gets the images that failed.

    Raises:
        PictureError: A result cannot be written.
    """
    paths: list[Path] = []
    for picture in drawn.pictures:
        planned = picture.source.planned
        if isinstance(picture.image, PictureError):
            report.skip(planned.header.path, picture.image)
            continue
        if planned.index not in targets:
            continue
        written = _write(job, targets[planned.index], picture)
        paths.append(written.path)
        drawer.on_written(drawn, written)
    drawer.on_batch_written(drawn, paths)


def _write(job: BatchJob, target: PlannedResult, drawn: DrawnPicture) -> WrittenPicture:
    assert not isinstance(drawn.image, PictureError)
    fit = target.planned.fit
    image = from_canvas(drawn.image, fit)
    alpha = drawn.source.picture.alpha if job.keep_alpha else None
    write_png(
        target.path,
        image,
        infotext=drawn.infotext,
        digest=target.digest,
        alpha=None if alpha is None else to_target(alpha, fit),
    )
    return WrittenPicture(target.planned, target.path, image, drawn.infotext)

"""Folders of images for the tab "Batch", with progress."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
from onediff_ext.hosts.diffusers.jobs.run_img2img import BatchDone, run_img2img
from onediff_ext.hosts.diffusers.jobs.run_report import RunReport
from onediff_ext.panel.choices import Choices
from onediff_ext.pictures.skipped import SkipReport
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.standalone.folder_progress import FolderProgress, plan_folder


def run_folder(
    standalone_app: StandaloneApp, choices: Choices, job: Img2ImgJob
) -> Iterator[FolderProgress]:
    """Run a job in its own thread and yield its progress.

    Raises:
        OneDiffError: A setting cannot be used, a result cannot be written, or the user cancelled.
            Written results stay, and the same job goes on there.
    """
    report = SkipReport()
    plan, progress = plan_folder(job, report)
    if not plan.todo:
        yield progress
        return
    plan.make_folders()
    events: queue.SimpleQueue[BatchDone | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            with standalone_app.turn():
                image_generator = standalone_app.loaded()
                standalone_app.apply(choices)
                image_generator.on_step = standalone_app.check_cancelled
                try:
                    run_img2img(
                        job,
                        plan,
                        image_generator,
                        RunReport(),
                        report,
                        session=standalone_app.session,
                        on_batch=events.put,
                    )
                finally:
                    image_generator.on_step = lambda _: None
        except BaseException as exc:
            events.put(exc)
        events.put(None)

    yield progress
    threading.Thread(target=work, name="onediff-folder", daemon=True).start()
    while (event := events.get()) is not None:
        if isinstance(event, BaseException):
            raise event
        progress.done += len(event.outputs)
        progress.paths += event.outputs
        progress.skipped = [str(entry) for entry in report.failures]
        size = f"{event.width_px}x{event.height_px}"
        progress.note = f"{size}, {event.drawn.seconds_per_step:.3f} s a step"
        progress.of_vae = [str(note) for note in event.drawn.notes]
        yield progress
    progress.skipped = [str(entry) for entry in report.failures]
    yield progress

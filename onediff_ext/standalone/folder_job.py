"""The page's batch tab: folders of pictures of any size, with progress."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onediff_ext.hosts.diffusers.jobs.img2img_job import BatchDone, Img2ImgJob, plan_job, run_job
from onediff_ext.hosts.diffusers.jobs.run_report import RunReport
from onediff_ext.panel.choices import Choices
from onediff_ext.pictures.planning import check_found
from onediff_ext.pictures.skipped import Report
from onediff_ext.standalone.app import StandaloneApp


@dataclass
class FolderProgress:
    """How far a run over folders is.

    Args:
        done, needed: Pictures.
        note: What was drawn last.
        paths: Finished pictures, the newest last.
        skipped: Inputs left out, with the reason.
    """

    done: int = 0
    needed: int = 0
    note: str = ""
    paths: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    already_done: int = 0


def run_folder(
    standalone_app: StandaloneApp, choices: Choices, job: Img2ImgJob
) -> Iterator[FolderProgress]:
    """Do a job in a thread of its own and tell how far it is.

    Raises:
        OneDiffError: A setting cannot be used, a result cannot be written, or the user has
            cancelled; what was written stays, and the same job goes on there.
    """
    report = Report()
    plan = plan_job(job, report)
    progress = FolderProgress(needed=len(plan.todo), already_done=len(plan.already_done))
    progress.skipped = [str(entry) for entry in report.failures]
    if not plan.todo:
        check_found(plan, job.inputs, report)
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
                    run_job(
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
        notes = "".join(f". {note}" for note in event.drawn.notes)
        progress.note = f"{size}, {event.drawn.seconds_per_step:.3f} s a step{notes}"
        yield progress
    progress.skipped = [str(entry) for entry in report.failures]
    yield progress

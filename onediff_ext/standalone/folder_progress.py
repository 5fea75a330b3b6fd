"""The progress of a run over folders, as the tab "Batch" shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob, plan_job
from onediff_ext.panel import html
from onediff_ext.panel.phrases import Phrases
from onediff_ext.pictures.batch.planning import Plan, check_found
from onediff_ext.pictures.skipped import SkipReport


@dataclass
class FolderProgress:
    """The progress of a run over folders.

    Args:
        done, needed: Numbers of images.
        note: Size and speed of the last batch.
        of_vae: How the VAE ran then, where the user should know.
        paths: Finished images, the newest last.
        skipped: Inputs that were left out, with the reasons.
        already_done: Number of results of an earlier run.
        titles, workers: Of a run on several GPUs: a table with a row for each worker.
    """

    done: int = 0
    needed: int = 0
    note: str = ""
    of_vae: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    already_done: int = 0
    titles: list[str] = field(default_factory=list)
    workers: list[list[object]] = field(default_factory=list)


def plan_folder(job: Img2ImgJob, report: SkipReport) -> tuple[Plan, FolderProgress]:
    """Make a job's plan, and its progress before anything is drawn.

    Args:
        job: What to do.
        report: Gets the inputs that are left out.

    Raises:
        OneDiffError: A setting cannot be used, or there is no input at all.
    """
    plan = plan_job(job, report)
    if not plan.todo:
        check_found(plan, job.batch.inputs, report)
    skipped = [str(entry) for entry in report.failures]
    return plan, FolderProgress(
        needed=len(plan.todo), already_done=len(plan.already_done), skipped=skipped
    )


def progress_html(progress: FolderProgress, words: Phrases) -> str:
    """Return the progress as HTML, in a language."""
    parts = []
    if progress.needed:
        text = words.translated(f"{progress.done} of {progress.needed}: {progress.note}".strip())
        parts.append(html.progress_bar(progress.done / progress.needed, text))
        parts.append(html.message("\n".join(progress.of_vae), words))
    if progress.workers:
        parts.append(_table(progress.titles, progress.workers))
    if progress.already_done:
        parts.append(html.message(f"{progress.already_done} were done already.", words))
    if progress.skipped:
        parts.append(html.message("Left out: " + "; ".join(progress.skipped[:10]), words))
    return "".join(parts)


def _table(titles: list[str], rows: list[list[object]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<table class="onediff-workers"><tr>{head}</tr>{body}</table>'

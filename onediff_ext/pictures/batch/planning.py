"""The plan of a run: which results are still missing, each with its size, name and digest."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onediff_ext.core.errors import OptionError, PictureError
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.batch.grouping import PlannedPicture, plan_pictures
from onediff_ext.pictures.batch.resume import job_digest, plan_outputs
from onediff_ext.pictures.captions import read_caption
from onediff_ext.pictures.finding import find_pictures
from onediff_ext.pictures.naming import NameFacts, distinct_names
from onediff_ext.pictures.skipped import SkipReport
from onediff_ext.pictures.urls import for_each
from onediff_ext.pictures.writing import make_folder


@dataclass(frozen=True)
class PlannedResult:
    """A result that is still missing.

    Args:
        planned: The image it is drawn from.
        path: Its PNG file.
        digest: From `resume.job_digest`.
    """

    planned: PlannedPicture
    path: Path
    digest: str


@dataclass(frozen=True)
class Plan:
    """The work of a run.

    Args:
        todo: Missing results, in the order of the inputs.
        already_done: Results that an earlier run of the same job made.
    """

    todo: list[PlannedResult]
    already_done: list[Path]

    def make_folders(self) -> None:
        """Make the folders of all results, before hours of work.

        Raises:
            PictureError: A folder cannot be made or written to.
        """
        for folder in {result.path.parent for result in self.todo}:
            make_folder(folder)


def check_found(plan: Plan, inputs: Sequence[Path], report: SkipReport) -> None:
    """Refuse inputs without a single image, readable or not.

    Raises:
        OptionError: The inputs hold no image.
    """
    if not plan.todo and not plan.already_done and not report.failures:
        folders = ", ".join(str(path) for path in inputs)
        raise OptionError(f"There is no picture in {folders}.", "Choose another folder.")


def plan_batch(
    job: BatchJob,
    settings_of: Callable[[PlannedPicture], Mapping[str, object]],
    report: SkipReport,
    *,
    earlier: Sequence[Callable[[PlannedPicture], Mapping[str, object]]] = (),
) -> Plan:
    """Find a job's images and settle sizes, names and digests.

    Reads headers and captions, no pixels.

    Args:
        job: What to do.
        settings_of: The host's part of what an image's result depends on;
            `BatchJob.digest_settings` is added to it.
        report: Gets the images that are left out.
        earlier: The host's part as earlier versions wrote it; their results count as done.

    Raises:
        OptionError: A setting cannot be used.
        PictureError: An input does not exist, or an existing result cannot be read.
    """
    found = find_pictures(
        job.inputs, report=report, recursive=job.recursive, output_dir=job.output_dir
    )
    paths = [picture.path for picture in found]
    planned = plan_pictures(paths, job.size_rule, report=report, max_megapixels=job.max_megapixels)
    if job.captions:
        planned = _with_captions(planned, report)
    names = _names(job, planned)
    digests, *others = (
        [job_digest({**of(one), **job.digest_settings(one)}, one.header) for one in planned]
        for of in (settings_of, *earlier)
    )
    outputs = plan_outputs(
        job.output_dir, names, digests, inputs=paths, earlier=list(zip(*others, strict=True))
    )
    return Plan(
        todo=[
            PlannedResult(one, output.path, digest)
            for one, output, digest in zip(planned, outputs, digests, strict=True)
            if not output.is_done
        ],
        already_done=[output.path for output in outputs if output.is_done],
    )


def _names(job: BatchJob, planned: Sequence[PlannedPicture]) -> list[str]:
    today = datetime.date.today()
    return distinct_names(
        [
            job.name_template.render(
                NameFacts(
                    path=one.header.path,
                    index=one.index,
                    seed=job.seed_of(one),
                    width_px=one.fit.target_width_px,
                    height_px=one.fit.target_height_px,
                    date=today,
                )
            )
            for one in planned
        ]
    )


def _with_captions(planned: Sequence[PlannedPicture], report: SkipReport) -> list[PlannedPicture]:
    """Add each image's caption; an image with an unreadable caption goes to the report.

    Captions are read once, so the drawn prompt is the one in the digest.
    """

    def captioned(one: PlannedPicture) -> PlannedPicture | PictureError:
        try:
            return replace(one, caption=read_caption(one.header.path))
        except PictureError as exc:
            return exc

    kept = []
    found = for_each(captioned, planned, [one.header.path for one in planned])
    for one, result in zip(planned, found, strict=True):
        if isinstance(result, PictureError):
            report.skip(one.header.path, result)
        else:
            kept.append(result)
    return kept

"""From folders of pictures to what is left to draw."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onediff_ext.core.errors import OptionError, PictureError
from onediff_ext.pictures.captions import read_caption
from onediff_ext.pictures.finding import find_pictures
from onediff_ext.pictures.grouping import PlannedPicture, plan_pictures
from onediff_ext.pictures.naming import NameFacts, NameTemplate, distinct_names
from onediff_ext.pictures.resume import job_digest, plan_outputs
from onediff_ext.pictures.sizing import MAX_MEGAPIXELS, SizeRule
from onediff_ext.pictures.skipped import Report
from onediff_ext.pictures.writing import make_folder


@dataclass(frozen=True)
class PlannedResult:
    """A result that is to be drawn.

    Args:
        planned: What it is generated from.
        path: Its PNG file.
        digest: Of the job that makes it, from `resume.job_digest`.
    """

    planned: PlannedPicture
    path: Path
    digest: str


@dataclass(frozen=True)
class Plan:
    """What is left to do.

    Args:
        todo: In the order of the inputs.
        already_done: Results of an earlier run of the same job.
    """

    todo: list[PlannedResult]
    already_done: list[Path]

    def make_folders(self) -> None:
        """Make the folders of all results, before hours of work.

        Raises:
            PictureError: One cannot be made, or takes no files.
        """
        for folder in {result.path.parent for result in self.todo}:
            make_folder(folder)


def check_found(plan: Plan, inputs: Sequence[Path], report: Report) -> None:
    """Refuse inputs in which there was nothing, not even a picture that had to be left out.

    Raises:
        OptionError: There was nothing.
    """
    if not plan.todo and not plan.already_done and not report.failures:
        folders = ", ".join(str(path) for path in inputs)
        raise OptionError(f"There is no picture in {folders}.", "Choose another folder.")


def plan_results(
    inputs: Sequence[Path],
    output_dir: Path,
    size_rule: SizeRule,
    name_template: NameTemplate,
    *,
    seed_of: Callable[[PlannedPicture], int],
    settings_of: Callable[[PlannedPicture], Mapping[str, object]],
    report: Report,
    recursive: bool = False,
    captions: bool = False,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> Plan:
    """Find the pictures and settle sizes and names; reads headers and captions only.

    Args:
        inputs: Files and folders.
        output_dir: Where results go.
        size_rule: How large each result becomes.
        name_template: How results are named.
        seed_of: A picture's seed.
        settings_of: What a picture's result depends on besides its input.
        report: Gets the pictures that are left out.
        recursive: Look into subfolders too.
        captions: Give each picture the text beside it as its caption.
        max_megapixels: Larger results are left out.

    Raises:
        OptionError: A setting cannot be used.
        PictureError: An input does not exist, or a result cannot be looked at.
    """
    found = find_pictures(inputs, report=report, recursive=recursive, output_dir=output_dir)
    paths = [picture.path for picture in found]
    planned = plan_pictures(paths, size_rule, report=report, max_megapixels=max_megapixels)
    if captions:
        planned = _with_captions(planned, report)
    today = datetime.date.today()
    names = distinct_names(
        [
            name_template.render(
                NameFacts(
                    path=one.facts.path,
                    index=one.index,
                    seed=seed_of(one),
                    width_px=one.fit.target_width_px,
                    height_px=one.fit.target_height_px,
                    date=today,
                )
            )
            for one in planned
        ]
    )
    digests = [job_digest(settings_of(one), one.facts) for one in planned]
    outputs = plan_outputs(output_dir, names, digests, inputs=paths)
    return Plan(
        todo=[
            PlannedResult(one, output.path, digest)
            for one, output, digest in zip(planned, outputs, digests, strict=True)
            if not output.is_done
        ],
        already_done=[output.path for output in outputs if output.is_done],
    )


def _with_captions(planned: Sequence[PlannedPicture], report: Report) -> list[PlannedPicture]:
    """Each picture with its caption; those whose caption cannot be read go to the report.

    Captions are read once: what is drawn later is what the digest was made of.
    """
    kept = []
    for one in planned:
        try:
            kept.append(replace(one, caption=read_caption(one.facts.path)))
        except PictureError as exc:
            report.skip(one.facts.path, exc)
    return kept

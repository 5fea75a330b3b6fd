"""Pictures of one canvas size together, read only when their batch is due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from onediff_ext.core.errors import OptionError, PictureError, ShapeError
from onediff_ext.pictures.fitting import to_canvas
from onediff_ext.pictures.formats import picture_errors
from onediff_ext.pictures.picture_header import PictureHeader, read_facts
from onediff_ext.pictures.reading import Picture, read_picture
from onediff_ext.pictures.sizing import MAX_MEGAPIXELS, Fit, SizeRule, fit_size
from onediff_ext.pictures.skipped import Report


@dataclass(frozen=True)
class PlannedPicture:
    """A picture that is going to be generated from.

    Args:
        index: Place among the inputs, from 0; skipped inputs keep their number, so a
            seed derived from it does not change when another file turns out broken.
        facts: From the header.
        fit: Target and canvas.
        caption: Its own prompt, as it was when the job was planned.
    """

    index: int
    facts: PictureHeader
    fit: Fit
    caption: str | None = None


@dataclass(frozen=True)
class LoadedPicture:
    """A planned picture, read.

    Args:
        planned: What was planned.
        picture: As read, in its own size.
        canvas: RGB picture of the canvas size.
    """

    planned: PlannedPicture
    picture: Picture
    canvas: Image.Image


@dataclass(frozen=True)
class Group:
    """Pictures that are generated on the same canvas, in input order."""

    canvas_width_px: int
    canvas_height_px: int
    pictures: tuple[PlannedPicture, ...]


def plan_pictures(
    paths: Iterable[Path],
    rule: SizeRule,
    *,
    report: Report,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> list[PlannedPicture]:
    """Read the headers of pictures and settle each one's size.

    Returns:
        The pictures in the order given, without those that `report` got: broken at
        the beginning, or too large under the rule.
    """
    planned = []
    for index, path in enumerate(paths):
        try:
            facts = read_facts(path)
            fit = fit_size(rule, facts.width_px, facts.height_px, max_megapixels=max_megapixels)
        except (PictureError, ShapeError) as exc:
            report.skip(path, exc)
        else:
            planned.append(PlannedPicture(index, facts, fit))
    return planned


def group_by_canvas(pictures: Sequence[PlannedPicture]) -> list[Group]:
    """Group pictures by canvas size.

    Returns:
        The groups in the order in which their sizes first occur; in each the pictures
        in the order given.
    """
    groups: dict[tuple[int, int], list[PlannedPicture]] = {}
    for planned in pictures:
        canvas = (planned.fit.canvas_width_px, planned.fit.canvas_height_px)
        groups.setdefault(canvas, []).append(planned)
    return [Group(width, height, tuple(members)) for (width, height), members in groups.items()]


def read_batches(
    group: Group, batch_size: int, *, report: Report
) -> Iterator[tuple[LoadedPicture, ...]]:
    """Read a group's pictures, a batch at a time.

    A picture that turns out broken goes to `report`, and the next one takes its place,
    so that all batches but the last are full.

    Args:
        group: From `group_by_canvas`.
        batch_size: Pictures in a batch at most, at least 1.
        report: Gets the broken ones.

    Raises:
        OptionError: `batch_size` is less than 1.
    """
    if batch_size < 1:
        raise OptionError(f"A batch of {batch_size} pictures cannot be made.", "Use 1 or more.")
    return _batches(group, batch_size, report)


def _batches(group: Group, batch_size: int, report: Report) -> Iterator[tuple[LoadedPicture, ...]]:
    batch: list[LoadedPicture] = []
    for planned in group.pictures:
        try:
            picture = read_picture(planned.facts.path)
            with picture_errors():
                canvas = to_canvas(picture.image, planned.fit)
        except (PictureError, ShapeError) as exc:
            report.skip(planned.facts.path, exc)
            continue
        batch.append(LoadedPicture(planned, picture, canvas))
        if len(batch) == batch_size:
            yield tuple(batch)
            batch = []
    if batch:
        yield tuple(batch)

"""Images grouped by canvas size and read in batches, each when it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from onediff_ext.core.errors import OptionError, PictureError, ShapeError
from onediff_ext.pictures.canvas_images import to_canvas
from onediff_ext.pictures.canvas_sizes import MAX_MEGAPIXELS, Fit, fit_size
from onediff_ext.pictures.formats import picture_errors
from onediff_ext.pictures.picture_header import PictureHeader, read_header
from onediff_ext.pictures.reading import Picture, read_picture
from onediff_ext.pictures.size_rules import SizeRule
from onediff_ext.pictures.skipped import SkipReport
from onediff_ext.pictures.urls import for_each


@dataclass(frozen=True)
class PlannedPicture:
    """An image that a result is drawn from.

    Args:
        index: Its place among the inputs, from 0. Skipped inputs keep their index, so a broken
            file does not change the seeds of the others.
        header: From the file's header.
        fit: Target and canvas.
        caption: Its own prompt, as read when the job was planned.
    """

    index: int
    header: PictureHeader
    fit: Fit
    caption: str | None = None


@dataclass(frozen=True)
class LoadedPicture:
    """A planned image with its pixels.

    Args:
        planned: Its plan.
        picture: The image in its own size.
        canvas: RGB image of the canvas size.
    """

    planned: PlannedPicture
    picture: Picture
    canvas: Image.Image


@dataclass(frozen=True)
class Group:
    """Images with the same canvas size, in input order."""

    canvas_width_px: int
    canvas_height_px: int
    pictures: tuple[PlannedPicture, ...]


def plan_pictures(
    paths: Iterable[Path],
    rule: SizeRule,
    *,
    report: SkipReport,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> list[PlannedPicture]:
    """Read the headers of images and settle each one's size.

    Args:
        paths: The images.
        rule: The size of each result.
        report: Gets the images with a broken header or too large a result.
        max_megapixels: Largest canvas, in millions of pixels.

    Returns:
        The other images, in the order given.
    """
    found = list(paths)

    def plan(index: int) -> PlannedPicture | PictureError | ShapeError:
        try:
            header = read_header(found[index])
            fit = fit_size(rule, header.width_px, header.height_px, max_megapixels=max_megapixels)
        except (PictureError, ShapeError) as exc:
            return exc
        return PlannedPicture(index, header, fit)

    planned = []
    for path, one in zip(found, for_each(plan, range(len(found)), found), strict=True):
        if isinstance(one, PlannedPicture):
            planned.append(one)
        else:
            report.skip(path, one)
    return planned


def group_by_canvas(pictures: Sequence[PlannedPicture]) -> list[Group]:
    """Group images by canvas size.

    Returns:
        The groups in the order in which their sizes first occur; the order within a group is
        the order given.
    """
    groups: dict[tuple[int, int], list[PlannedPicture]] = {}
    for planned in pictures:
        canvas = (planned.fit.canvas_width_px, planned.fit.canvas_height_px)
        groups.setdefault(canvas, []).append(planned)
    return [Group(width, height, tuple(members)) for (width, height), members in groups.items()]


def split_group(group: Group, batch_size: int) -> list[tuple[PlannedPicture, ...]]:
    """Split a group into batches, in order; the last one may be smaller.

    Batches depend on the plan alone. A broken image leaves its batch smaller and no other batch
    different, so pictures do not depend on who reads which batch.

    Args:
        group: From `group_by_canvas`.
        batch_size: Most images in a batch, at least 1.

    Raises:
        OptionError: `batch_size` is less than 1.
    """
    if batch_size < 1:
        raise OptionError(f"A batch of {batch_size} pictures cannot be made.", "Use 1 or more.")
    starts = range(0, len(group.pictures), batch_size)
    return [group.pictures[start : start + batch_size] for start in starts]


def load_pictures(
    pictures: Iterable[PlannedPicture], *, report: SkipReport
) -> tuple[LoadedPicture, ...]:
    """Read the images of one batch.

    Args:
        pictures: From `split_group`.
        report: Gets the broken images.
    """
    wanted = list(pictures)
    loaded = []
    found = for_each(_load, wanted, [planned.header.path for planned in wanted])
    for planned, one in zip(wanted, found, strict=True):
        if isinstance(one, LoadedPicture):
            loaded.append(one)
        else:
            report.skip(planned.header.path, one)
    return tuple(loaded)


def _load(planned: PlannedPicture) -> LoadedPicture | PictureError | ShapeError:
    try:
        picture = read_picture(planned.header.path)
        with picture_errors():
            canvas = to_canvas(picture.image, planned.fit)
    except (PictureError, ShapeError) as exc:
        return exc
    return LoadedPicture(planned, picture, canvas)

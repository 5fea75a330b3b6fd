"""Contact sheets: several images of different sizes on one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_GAP_PX = 12
_LABEL_PX = 22
_PAPER, _INK = (255, 255, 255), (70, 70, 70)


def make_contact_sheet(
    rows: Sequence[tuple[str, Sequence[Path]]], *, row_height_px: int = 190
) -> Image.Image:
    """Lay out rows of images in aligned columns.

    Args:
        rows: (label, images); all rows have the same number of images.
        row_height_px: Height of every image; the widths follow.

    Returns:
        RGB image.
    """
    columns = [
        [_scaled(path, row_height_px) for path in column]
        for column in zip(*(paths for _, paths in rows), strict=True)
    ]
    widths = [max(image.width for image in column) for column in columns]
    sheet = Image.new(
        "RGB",
        (
            sum(widths) + _GAP_PX * (len(widths) + 1),
            len(rows) * (row_height_px + _LABEL_PX + _GAP_PX) + _GAP_PX,
        ),
        _PAPER,
    )
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for i, (label, _) in enumerate(rows):
        top = _GAP_PX + i * (row_height_px + _LABEL_PX + _GAP_PX)
        draw.text((_GAP_PX, top), label, fill=_INK, font=font)
        left = _GAP_PX
        for width, column in zip(widths, columns, strict=True):
            image = column[i]
            sheet.paste(image, (left + (width - image.width) // 2, top + _LABEL_PX))
            left += width + _GAP_PX
    return sheet


def stack(sheets: Sequence[Image.Image]) -> Image.Image:
    """Put sheets below each other; the result is as wide as the widest."""
    whole = Image.new(
        "RGB", (max(sheet.width for sheet in sheets), sum(sheet.height for sheet in sheets)), _PAPER
    )
    top = 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    return whole


def _scaled(path: Path, height_px: int) -> Image.Image:
    with Image.open(path) as image:
        picture = image.convert("RGB")
    width = max(1, round(picture.width * height_px / picture.height))
    scaled: Image.Image = picture.resize((width, height_px), Image.Resampling.LANCZOS)
    return scaled

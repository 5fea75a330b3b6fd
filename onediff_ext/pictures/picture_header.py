"""What a picture's header says, without decoding its pixels."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from onediff_ext.pictures.formats import open_picture
from onediff_ext.pictures.png_chunks import read_png

_LOG = logging.getLogger(__name__)

_ORIENTATION_TAG = 0x0112
_TIFF_WIDTH_TAG, _TIFF_HEIGHT_TAG = 256, 257
_SIDES_SWAPPED = (5, 6, 7, 8)


@dataclass(frozen=True)
class PictureHeader:
    """A picture as its header describes it.

    Args:
        path: The file.
        width_px, height_px: Size as a viewer shows it, EXIF rotation applied.
        file_format: Pillow's name of the format, such as ``"JPEG"``.
        mode: Pillow's name of the pixel layout, such as ``"RGB"`` or ``"I;16"``.
        size_bytes, modified_ns: Of the file, so that a changed file is noticed.
    """

    path: Path
    width_px: int
    height_px: int
    file_format: str
    mode: str
    size_bytes: int
    modified_ns: int


def read_facts(path: Path) -> PictureHeader:
    """Read a picture's header.

    Raises:
        PictureError: As `formats.open_picture`. A file that is broken behind its
            header is not noticed here.
    """
    with open_picture(path) as image:
        return facts_of(path, image)


def facts_of(path: Path, image: Image.Image) -> PictureHeader:
    """Describe an open picture that has not been loaded yet."""
    width_px, height_px = _upright_size(path, image)
    status = path.stat()
    return PictureHeader(
        path=path,
        width_px=width_px,
        height_px=height_px,
        file_format=image.format or "",
        mode=image.mode,
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
    )


def _upright_size(path: Path, image: Image.Image) -> tuple[int, int]:
    width_px, height_px = image.size
    orientation = orientation_of(path, image)
    if isinstance(image, TiffImageFile):
        # Pillow 11 and later give the turned size before loading, earlier ones the stored.
        width_px, height_px = image.tag_v2[_TIFF_WIDTH_TAG], image.tag_v2[_TIFF_HEIGHT_TAG]
        orientation = image.tag_v2.get(_ORIENTATION_TAG, 1)
    swapped = orientation in _SIDES_SWAPPED
    return (height_px, width_px) if swapped else (width_px, height_px)


def orientation_of(path: Path, image: Image.Image) -> int:
    """Return how an open picture must still be turned: EXIF's 1 (not at all) to 8.

    Must be asked before the picture is loaded. A damaged EXIF block counts as none.
    """
    try:
        orientation = _exif(path, image).get(_ORIENTATION_TAG)
    except Exception as exc:  # Pillow's readers of EXIF raise whatever they meet
        _LOG.debug("%s: the EXIF block is ignored: %s", path, exc)
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _exif(path: Path, image: Image.Image) -> Image.Exif:
    exif = Image.Exif()
    if image.format == "TIFF":
        # Pillow turns a TIFF itself while loading.
        return exif
    if image.format != "PNG" or "exif" in image.info:
        return image.getexif()
    late_exif = read_png(path).exif
    if late_exif:
        exif.load(b"Exif\0\0" + late_exif)
        return exif
    # PngImageFile.getexif() would decode all pixels to look for EXIF behind them.
    return Image.Image.getexif(image)

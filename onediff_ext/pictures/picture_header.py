"""An image's header: size, format and orientation, without decoding pixels."""

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
    """An image as its header describes it.

    Args:
        path: The file.
        width_px, height_px: Size as a viewer shows it, with the EXIF rotation.
        file_format: Pillow's name of the format, such as ``"JPEG"``.
        mode: Pillow's name of the pixel layout, such as ``"RGB"`` or ``"I;16"``.
        size_bytes, modified_ns: Of the file; they reveal a changed file.
    """

    path: Path
    width_px: int
    height_px: int
    file_format: str
    mode: str
    size_bytes: int
    modified_ns: int


def read_header(path: Path) -> PictureHeader:
    """Read an image's header.

    Raises:
        PictureError: As in `formats.open_picture`. Damage behind the header stays unnoticed.
    """
    with open_picture(path) as image:
        return header_of(path, image)


def header_of(path: Path, image: Image.Image) -> PictureHeader:
    """Describe an open image that is not loaded yet."""
    width_px, height_px = _upright_size(path, image)
    status = path.stat()
    return PictureHeader(
        path=path,
        width_px=width_px,
        height_px=height_px,
        file_format=image.format or "",
        mode=image.mode,
        size_bytes=status.st_size,
        # Over a network the time is a float, and 0 where the server tells none.
        modified_ns=getattr(status, "st_mtime_ns", 0) or round(status.st_mtime * 1e9),
    )


def _upright_size(path: Path, image: Image.Image) -> tuple[int, int]:
    width_px, height_px = image.size
    orientation = orientation_of(path, image)
    if isinstance(image, TiffImageFile):
        # Before loading, Pillow 11 and later report the turned size, earlier versions the stored.
        width_px, height_px = image.tag_v2[_TIFF_WIDTH_TAG], image.tag_v2[_TIFF_HEIGHT_TAG]
        orientation = image.tag_v2.get(_ORIENTATION_TAG, 1)
    swapped = orientation in _SIDES_SWAPPED
    return (height_px, width_px) if swapped else (width_px, height_px)


def orientation_of(path: Path, image: Image.Image) -> int:
    """Return the EXIF orientation that is still to be applied, from 1 (none) to 8.

    Must be called before the image is loaded. A damaged EXIF block counts as none.
    """
    try:
        orientation = _exif(path, image).get(_ORIENTATION_TAG)
    except Exception as exc:  # Pillow's EXIF readers raise many kinds of errors
        _LOG.debug("%s: the EXIF block is ignored: %s", path, exc)
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _exif(path: Path, image: Image.Image) -> Image.Exif:
    exif = Image.Exif()
    if image.format == "TIFF":
        # Pillow itself turns a TIFF while loading.
        return exif
    if image.format != "PNG" or "exif" in image.info:
        return image.getexif()
    late_exif = read_png(path).exif
    if late_exif:
        exif.load(b"Exif\0\0" + late_exif)
        return exif
    # PngImageFile.getexif() would decode all pixels to look for EXIF behind them.
    return Image.Image.getexif(image)

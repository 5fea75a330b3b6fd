"""Reads an image: upright, 8-bit sRGB, first frame."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from onediff_ext.pictures.colour import to_rgb
from onediff_ext.pictures.formats import open_picture
from onediff_ext.pictures.picture_header import PictureHeader, header_of, orientation_of
from onediff_ext.pictures.stored_pixels import as_meant, stored_as

# EXIF orientation → the operation that makes the image upright. CIPA DC-008, tag 0x0112.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Picture:
    """An image in memory.

    Args:
        image: RGB, upright; transparent parts are white.
        alpha: "L" image of the same size, 255 where opaque; None if every pixel is opaque.
            img2img works on `image` and its result is opaque, as in the WebUI. A caller can put
            `alpha` into the result.
        header: Of the file, with the size of `image`.
    """

    image: Image.Image
    alpha: Image.Image | None
    header: PictureHeader


def read_picture(path: Path) -> Picture:
    """Read an image file.

    Applies the EXIF rotation and the embedded colour profile, scales more than 8 bits down, and
    takes the first frame of an animation.

    Raises:
        PictureError: The file cannot be opened, is no image, or is broken or truncated.
    """
    with open_picture(path) as opened:
        header = header_of(path, opened)
        turn = _TURNS.get(orientation_of(path, opened))
        stored = stored_as(opened)
        opened.load()
        image, alpha = to_rgb(as_meant(opened, stored))
        if image is opened:
            image = opened.copy()
        image.info = {}
    if turn is not None:
        image = image.transpose(turn)
        alpha = alpha.transpose(turn) if alpha is not None else None
    return Picture(image, alpha, replace(header, width_px=image.width, height_px=image.height))

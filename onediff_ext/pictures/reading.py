"""Reading a picture: upright, 8-bit sRGB, first frame."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from onediff_ext.pictures.colour import to_rgb
from onediff_ext.pictures.formats import open_picture
from onediff_ext.pictures.picture_header import PictureHeader, facts_of, orientation_of

# EXIF orientation → what makes the picture upright. CIPA DC-008, tag 0x0112.
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
    """A picture in memory.

    Args:
        image: RGB, upright; transparent parts lie on white.
        alpha: "L" picture of the same size, 255 where opaque; None when all is opaque.
            img2img works on `image` and its result is opaque, as in the WebUI; a caller
            who wants the outline back puts `alpha` into the result.
        facts: What the file said.
    """

    image: Image.Image
    alpha: Image.Image | None
    facts: PictureHeader


def read_picture(path: Path) -> Picture:
    """Read a picture file.

    EXIF rotation is applied, the embedded colour profile followed, more than 8 bits
    scaled down, and of an animation the first frame taken.

    Raises:
        PictureError: The file cannot be opened, is no picture, or is broken or cut off
            anywhere.
    """
    with open_picture(path) as opened:
        facts = facts_of(path, opened)
        turn = _TURNS.get(orientation_of(path, opened))
        opened.load()
        image, alpha = to_rgb(opened)
        if image is opened:
            image = opened.copy()
        image.info = {}
    if turn is not None:
        image = image.transpose(turn)
        alpha = alpha.transpose(turn) if alpha is not None else None
    return Picture(image, alpha, replace(facts, width_px=image.width, height_px=image.height))

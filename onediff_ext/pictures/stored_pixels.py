"""What Pillow leaves as the file has it: pixels of 12 bits, zero as white, a transparent colour."""

from __future__ import annotations

from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

_PHOTOMETRIC_TAG, _ZERO_IS_WHITE = 262, 0
_WHITE_12_BIT, _WHITE_16_BIT = 0xFFF, 0xFFFF
_GREY_STEPS = {"L;2": 85, "L;4": 17}
"""Pillow spreads grey of few bits over 0 to 255, but not the transparent one."""


def stored_as(image: Image.Image) -> str:
    """Return Pillow's name of the pixels in the file, such as "L;4"; empty if it does not tell.

    Must be called before the image is loaded.
    """
    tiles = getattr(image, "tile", None)  # only of files
    arguments = tiles[0][3] if tiles else ""
    first = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return first if isinstance(first, str) else ""


def as_meant(image: Image.Image, stored: str) -> Image.Image:
    """Return a loaded image whose white and whose transparent colour are those of its mode.

    Args:
        image: As loaded from its file.
        stored: From `stored_as`.
    """
    if stored == "I;12":
        scale = _WHITE_16_BIT / _WHITE_12_BIT
        return image.convert("I").point(lambda value: value * scale + 0.5)
    if stored.startswith("I;16") and isinstance(image, TiffImageFile):
        if image.tag_v2.get(_PHOTOMETRIC_TAG) == _ZERO_IS_WHITE:
            return image.convert("I").point(lambda value: value * -1 + _WHITE_16_BIT)
        return image
    key = image.info.get("transparency")
    if isinstance(key, int) and stored in _GREY_STEPS:
        return _with_key(image, key * _GREY_STEPS[stored])
    if isinstance(key, tuple) and stored.startswith("RGB;16"):
        return _with_key(image, tuple(part >> 8 for part in key))
    return image


def _with_key(image: Image.Image, key: int | tuple[int, ...]) -> Image.Image:
    image = image.copy()
    image.info["transparency"] = key
    return image

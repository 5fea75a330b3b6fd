"""Converts images of any mode to 8-bit sRGB on white, with the alpha beside it.

Transparent pixels become white, as in a viewer or in print. The alpha is returned too, so that a
caller can save it again.
"""

from __future__ import annotations

import io
import logging
import math
from array import array

from PIL import Image, ImageCms

_LOG = logging.getLogger(__name__)

_WHITE = (255, 255, 255)
_MAX_16_BIT = 65535
_GREY = 128
_MOST_LEVELS_OFF = 16
"""The middle grey of sRGB's own profiles is off by less; that of a linear one is off by 60."""
_FROM_16_BIT = [(value * 255 + _MAX_16_BIT // 2) // _MAX_16_BIT for value in range(65536)]


def to_rgb(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Convert a loaded image of any mode to sRGB on white.

    An embedded ICC profile is applied, unless it is damaged or does not fit the pixels. Values of
    more than 8 bits are scaled, never clipped: 16-bit white becomes 8-bit white.

    Args:
        image: A loaded image, upright.

    Returns:
        (RGB image, alpha as an "L" image of the same size, or None if every pixel is opaque).
    """
    profile = image.info.get("icc_profile")
    colours, alpha = _split_alpha(_to_8_bit(image))
    rgb = _to_srgb(colours, profile if isinstance(profile, bytes) else b"")
    if alpha is None or alpha.getextrema() == (255, 255):
        return rgb, None
    on_white = Image.new("RGB", rgb.size, _WHITE)
    on_white.paste(rgb, mask=alpha)
    return on_white, alpha


def _to_8_bit(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;"):
        return _from_integers(image)
    if image.mode == "F":
        image = _finite(image)
        brightest = float(_brightest(image))
        # Floats have no standard white: take the smallest usual one that no pixel exceeds.
        white = next((white for white in (1.0, 255.0, 65535.0) if brightest <= white), brightest)
        scale = 255 / white
        return image.point(lambda value: value * scale + 0.5).convert("L")
    return image


def _finite(image: Image.Image) -> Image.Image:
    """Make NaN, which marks pixels without data, black, and infinity as bright as the brightest."""
    if math.isfinite(_brightest(image)):
        return image
    values = array("f", image.tobytes())
    brightest = max(filter(math.isfinite, values), default=1.0)
    # NaN is neither above nor below.
    repaired = (v if v <= brightest else brightest if v > brightest else 0.0 for v in values)
    return Image.frombytes("F", image.size, array("f", repaired).tobytes())


def _from_integers(image: Image.Image) -> Image.Image:
    transparent = image.info.get("transparency")
    wide = image.convert("I")
    brightest = _brightest(wide)
    if brightest > _MAX_16_BIT:
        # Only 32-bit TIFFs get here. They have no standard white: the brightest pixel is taken.
        scale = _MAX_16_BIT / brightest
        wide = wide.point(lambda value: value * scale + 0.5)
    grey = wide.point(_FROM_16_BIT, "L")
    if not isinstance(transparent, int):
        return grey
    opaque = [255] * (_MAX_16_BIT + 1)
    opaque[min(max(transparent, 0), _MAX_16_BIT)] = 0
    return Image.merge("LA", (grey, wide.point(opaque, "L")))


def _brightest(image: Image.Image) -> float:
    extrema = image.getextrema()
    brightest = extrema[1]
    return brightest if isinstance(brightest, (int, float)) else 0.0


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Split colours and alpha; the colours are in L, RGB, CMYK, LAB or similar modes."""
    if image.mode == "P" and not _has_transparency(image):
        return image.convert("RGB"), None
    if not _has_transparency(image):
        return (image.convert("L") if image.mode == "1" else image), None
    if image.mode in ("LA", "La"):
        grey_alpha = image.convert("LA")
        return grey_alpha.getchannel("L"), grey_alpha.getchannel("A")
    rgba = image.convert("RGBA")
    return rgba.convert("RGB"), rgba.getchannel("A")


def _has_transparency(image: Image.Image) -> bool:
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        return True
    if image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A"):
        return True
    return "transparency" in image.info and image.mode in ("1", "L", "P", "RGB")


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    if image.mode == "LAB":
        return _through_profile(image, ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")))
    if profile and image.mode in ("RGB", "L", "CMYK"):
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if image.mode != "RGB" or not _is_srgb(source):
                return _through_profile(image, source)
        except (ImageCms.PyCMSError, OSError, ValueError) as exc:
            _LOG.debug("The colour profile is ignored: %s", exc)
    return image.convert("RGB")


def _is_srgb(profile: ImageCms.ImageCmsProfile) -> bool:
    """Whether a profile is sRGB by its name and its tone curve: "Linear sRGB" is not."""
    if "srgb" not in ImageCms.getProfileDescription(profile).lower():
        return False
    grey = _through_profile(Image.new("RGB", (1, 1), (_GREY, _GREY, _GREY)), profile)
    return all(abs(level - _GREY) <= _MOST_LEVELS_OFF for level in grey.tobytes())


def _through_profile(image: Image.Image, source: ImageCms.ImageCmsProfile) -> Image.Image:
    converted = ImageCms.profileToProfile(
        image,
        source,
        ImageCms.createProfile("sRGB"),
        renderingIntent=ImageCms.Intent.PERCEPTUAL,
        outputMode="RGB",
    )
    if converted is None:
        raise ValueError("The colour profile gave no picture.")
    return converted

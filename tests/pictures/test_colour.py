"""Pixels of unusual files as 8-bit sRGB: profiles, depths and transparent colours."""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path

import pytest
from PIL import Image, ImageCms

from onediff_ext.pictures.reading import read_picture


def test_a_linear_profile_is_followed_whatever_its_name(tmp_path: Path) -> None:
    # Image editors embed "Linear sRGB" in pictures of linear light; its middle grey is a light one.
    linear = _linear_srgb_profile()
    assert "sRGB" in ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(linear)))
    Image.new("RGB", (8, 8), (128, 128, 128)).save(tmp_path / "a.png", icc_profile=linear)
    assert _grey_at(tmp_path / "a.png", 4) == 188


def test_pixels_with_srgbs_own_profile_stay_as_they_are(tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    noise = Image.effect_noise((97, 61), 80).convert("RGB")
    noise.save(tmp_path / "a.png", icc_profile=profile)
    assert read_picture(tmp_path / "a.png").image.tobytes() == noise.tobytes()


def _linear_srgb_profile() -> bytes:
    """Pillow's sRGB profile with its name, and a gamma of 1 as its tone curve (ICC.1, 10.18)."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    gamma_1 = struct.pack(">4s4xHHI", b"para", 0, 0, 1 << 16)
    curve = profile.index(b"para\0\0\0\0")  # one curve for red, green and blue
    return profile[:curve] + gamma_1 + profile[curve + len(gamma_1) :]


def _grey_at(path: Path, x: int) -> int:
    red, green, blue = read_picture(path).image.getpixel((x, 0))  # type: ignore[misc]
    assert red == green == blue
    return int(red)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_floats_that_are_no_numbers_spoil_no_other_pixel(tmp_path: Path, bad: float) -> None:
    image = Image.new("F", (3, 1), 0.5)
    image.putpixel((0, 0), bad)
    image.putpixel((2, 0), 1.0)
    image.save(tmp_path / "a.tif")
    expected = 255 if bad == math.inf else 0
    assert [_grey_at(tmp_path / "a.tif", x) for x in range(3)] == [expected, 128, 255]

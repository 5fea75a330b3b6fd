"""Pixels of unusual files as 8-bit sRGB: profiles, depths and transparent colours."""

from __future__ import annotations

import io
import math
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image, ImageCms

from onediff_ext.pictures.reading import read_picture
from tests.pictures.test_reading import png_16_bit, png_with


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


def test_twelve_bit_tiff_is_scaled(tmp_path: Path) -> None:
    # Two pixels in three bytes: 0xFFF and 0x800.
    (tmp_path / "a.tif").write_bytes(_grey_tiff(12, 1, bytes.fromhex("FFF800")))
    assert [_grey_at(tmp_path / "a.tif", x) for x in range(2)] == [255, 128]


def test_sixteen_bit_tiff_whose_zero_is_white(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(_grey_tiff(16, 0, struct.pack("<2H", 0, 0xFFFF)))
    assert [_grey_at(tmp_path / "a.tif", x) for x in range(2)] == [255, 0]


def _grey_tiff(bits: int, photometric: int, pixels: bytes) -> bytes:
    """A TIFF of 2x1 pixels. TIFF 6.0, section 2; `photometric` is 0 where zero is white."""
    entries = {256: 2, 257: 1, 258: bits, 259: 1, 262: photometric, 277: 1, 278: 1}
    entries |= {279: len(pixels), 273: 8 + 2 + 12 * 9 + 4}
    packed = b"".join(struct.pack("<HHII", tag, 4, 1, entries[tag]) for tag in sorted(entries))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4) + pixels


@pytest.mark.parametrize(("bits", "key", "byte"), [(1, 0, 0x7F), (2, 1, 0x70), (4, 3, 0x3F)])
def test_a_transparent_grey_of_few_bits(tmp_path: Path, bits: int, key: int, byte: int) -> None:
    # The first pixel has the transparent grey, the second another one.
    header = struct.pack(">IIBBBBB", 2, 1, bits, 0, 0, 0, 0)
    row = zlib.compress(bytes([0, byte]))
    key_chunk = (b"tRNS", struct.pack(">H", key))
    (tmp_path / "a.png").write_bytes(
        png_with((b"IHDR", header), key_chunk, (b"IDAT", row), (b"IEND", b""))
    )
    picture = read_picture(tmp_path / "a.png")
    assert picture.alpha is not None
    assert picture.alpha.tobytes() == bytes((0, 255))
    assert picture.image.getpixel((0, 0)) == (255, 255, 255)


def test_a_dark_transparent_colour_of_sixteen_bits(tmp_path: Path) -> None:
    key = struct.pack(">3H", 255, 255, 255)  # nearly black, and no white of 8 bits
    content = png_16_bit(2, [255] * 3 + [0xFFFF] * 3, (b"tRNS", key))
    (tmp_path / "a.png").write_bytes(content)
    alpha = read_picture(tmp_path / "a.png").alpha
    assert alpha is not None
    assert alpha.tobytes() == bytes((0, 255))

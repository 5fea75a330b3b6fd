"""Reading pictures of every kind, whole and broken."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageCms, ImageFile, ImageOps, PngImagePlugin, features

from onediff_ext.core.errors import PictureError
from onediff_ext.pictures import formats
from onediff_ext.pictures.picture_header import read_header
from onediff_ext.pictures.reading import read_picture

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def near(image: Image.Image, at: tuple[int, int], colour: tuple[int, int, int], by: int) -> bool:
    pixel = image.getpixel(at)
    assert isinstance(pixel, tuple)
    return all(abs(a - b) <= by for a, b in zip(pixel, colour, strict=True))


def corners() -> Image.Image:
    """Return a 48x32 picture with a red upper left and a blue lower right."""
    image = Image.new("RGB", (48, 32), "white")
    image.paste(RED, (0, 0, 16, 16))
    image.paste(BLUE, (32, 16, 48, 32))
    return image


def png_with(*chunks: tuple[bytes, bytes]) -> bytes:
    packed = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + packed


def png_16_bit(colour_type: int, pixels: list[int], *extra: tuple[bytes, bytes]) -> bytes:
    """Return a PNG one pixel high with 16 bits a sample."""
    samples = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
    header = struct.pack(">IIBBBBB", len(pixels) // samples, 1, 16, colour_type, 0, 0, 0)
    row = zlib.compress(b"\0" + struct.pack(f">{len(pixels)}H", *pixels))
    return png_with((b"IHDR", header), *extra, (b"IDAT", row), (b"IEND", b""))


# How a picture must lie in the file so that a viewer who turns it by the tag sees it upright.
TURNED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif", "lzw.tif"])
def test_exif_rotation_is_applied(tmp_path: Path, orientation: int, ending: str) -> None:
    turn = TURNED[orientation]
    stored = corners().transpose(turn) if turn is not None else corners()
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"jpg": {"quality": 95}, "webp": {"lossless": True}, "lzw.tif": {}}.get(ending, {})
    if ending == "lzw.tif":
        options = {"compression": "tiff_lzw"}
    path = tmp_path / f"a.{ending}"
    stored.save(path, exif=exif, **options)
    header = read_header(path)
    assert (header.width_px, header.height_px) == (48, 32)
    picture = read_picture(path)
    assert picture.image.size == (48, 32)
    assert near(picture.image, (4, 4), RED, 30)
    assert near(picture.image, (44, 28), BLUE, 30)
    assert near(picture.image, (44, 4), WHITE, 30)
    assert picture.header == header


def test_exif_behind_the_pixels_of_a_png_counts(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    row = zlib.compress(b"\0" + b"\xff\0\0" * 20)
    header = struct.pack(">IIBBBBB", 20, 1, 8, 2, 0, 0, 0)
    path = tmp_path / "a.png"
    late = (b"eXIf", exif.tobytes()[6:])
    path.write_bytes(png_with((b"IHDR", header), (b"IDAT", row), late, (b"IEND", b"")))
    assert (read_header(path).width_px, read_header(path).height_px) == (1, 20)
    assert read_picture(path).image.size == (1, 20)


@pytest.mark.parametrize("block", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"x"])
def test_a_damaged_exif_block_is_ignored(tmp_path: Path, block: bytes) -> None:
    corners().save(tmp_path / "a.jpg", exif=block)
    assert read_picture(tmp_path / "a.jpg").image.size == (48, 32)


def test_an_impossible_orientation_is_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 99
    corners().save(tmp_path / "a.jpg", exif=exif)
    assert read_picture(tmp_path / "a.jpg").header.width_px == 48


def test_a_header_is_read_without_the_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corners().save(tmp_path / "a.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _self: pytest.fail("loaded"))
    header = read_header(tmp_path / "a.png")
    assert (header.file_format, header.mode) == ("PNG", "RGB")
    assert header.size_bytes == (tmp_path / "a.png").stat().st_size


@pytest.mark.parametrize("ending", ["jpg", "tif"])
def test_cmyk_becomes_rgb(tmp_path: Path, ending: str) -> None:
    image = Image.new("CMYK", (32, 16), (0, 255, 255, 0))
    image.paste((0, 0, 0, 0), (16, 0, 32, 16))
    image.save(tmp_path / f"a.{ending}")
    picture = read_picture(tmp_path / f"a.{ending}")
    assert picture.image.mode == "RGB"
    assert picture.header.mode == "CMYK"
    assert near(picture.image, (4, 8), RED, 8)
    assert near(picture.image, (28, 8), WHITE, 8)


def test_a_colour_profile_is_followed(tmp_path: Path) -> None:
    # A profile whose red is sRGB's green shows that the profile decides.
    swapped = _profile_with_primaries_swapped()
    Image.new("RGB", (8, 8), RED).save(tmp_path / "a.png", icc_profile=swapped)
    assert near(read_picture(tmp_path / "a.png").image, (4, 4), GREEN, 12)


def _profile_with_primaries_swapped() -> bytes:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    profile = profile.replace(b"rXYZ", b"?XYZ").replace(b"gXYZ", b"rXYZ")
    profile = profile.replace(b"?XYZ", b"gXYZ")
    name, other = "sRGB built-in", "made for test"
    return profile.replace(name.encode("utf-16-be"), other.encode("utf-16-be"))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("profile", [b"no profile", b"\0" * 200, "LAB", "XYZ", "sRGB"])
def test_a_profile_that_does_not_fit_is_ignored(
    tmp_path: Path, mode: str, profile: bytes | str
) -> None:
    if isinstance(profile, str):
        made = ImageCms.createProfile(profile)  # type: ignore[arg-type]
        profile = ImageCms.ImageCmsProfile(made).tobytes()
    white = {"RGB": WHITE, "L": 255, "CMYK": (0, 0, 0, 0)}[mode]
    Image.new(mode, (16, 16), white).save(tmp_path / "a.jpg", icc_profile=profile)
    assert near(read_picture(tmp_path / "a.jpg").image, (8, 8), WHITE, 2)


def test_sixteen_bit_grey_is_scaled(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png_16_bit(0, [0, 0x8000, 0xFFFF, 300]))
    image = read_picture(path).image
    assert [image.getpixel((x, 0))[0] for x in range(4)] == [0, 128, 255, 1]  # type: ignore[index]


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bit_grey_tiff_is_scaled(tmp_path: Path, order: str) -> None:
    raw = struct.pack(f"{order}4H", 0, 0x8000, 0xFFFF, 300)
    mode = "I;16" if order == "<" else "I;16B"
    Image.frombytes(mode, (4, 1), raw).save(tmp_path / "a.tif")
    image = read_picture(tmp_path / "a.tif").image
    assert [image.getpixel((x, 0))[0] for x in range(4)] == [0, 128, 255, 1]  # type: ignore[index]


@pytest.mark.parametrize("colour_type", [2, 4, 6])
def test_sixteen_bit_colour_and_alpha_are_scaled(tmp_path: Path, colour_type: int) -> None:
    samples = {2: 3, 4: 2, 6: 4}[colour_type]
    path = tmp_path / "a.png"
    path.write_bytes(
        png_16_bit(colour_type, [0x8000] * (samples - 1) + [0xFFFF] + [0xFFFF] * samples)
    )
    picture = read_picture(path)
    assert picture.alpha is None
    assert picture.image.getpixel((1, 0)) == WHITE
    assert near(
        picture.image.crop((0, 0, 1, 1)), (0, 0), (128, 128, 128 if samples != 3 else 255), 1
    )


def test_sixteen_bit_transparent_colours_are_scaled(tmp_path: Path) -> None:
    grey, colour = tmp_path / "grey.png", tmp_path / "colour.png"
    grey.write_bytes(png_16_bit(0, [1000, 50_000], (b"tRNS", struct.pack(">H", 1000))))
    picture = read_picture(grey)
    assert picture.image.getpixel((0, 0)) == WHITE
    assert picture.alpha is not None
    assert [picture.alpha.getpixel((x, 0)) for x in range(2)] == [0, 255]
    key = (0x8000, 0x1000, 0xFFFF)
    colour.write_bytes(png_16_bit(2, [*key, 0, 0, 0], (b"tRNS", struct.pack(">3H", *key))))
    picture = read_picture(colour)
    assert [picture.image.getpixel((x, 0)) for x in range(2)] == [WHITE, (0, 0, 0)]


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("F", [0.0, 0.5, 1.0], [0, 128, 255]),
        ("F", [0.0, 100.0, 255.0], [0, 100, 255]),
        ("F", [0.0, 1e6, 2e6], [0, 128, 255]),
        ("I", [0, 32768, 65535], [0, 128, 255]),
        ("I", [0, 2**29, 2**30], [0, 128, 255]),
    ],
)
def test_wide_pixels_are_scaled(
    tmp_path: Path, mode: str, values: list[float], expected: list[int]
) -> None:
    image = Image.new(mode, (3, 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    image.save(tmp_path / "a.tif")
    read = read_picture(tmp_path / "a.tif").image
    assert [read.getpixel((x, 0))[0] for x in range(3)] == expected  # type: ignore[index]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
@pytest.mark.parametrize("ending", ["png", "bmp", "tif", "gif"])
def test_opaque_modes(tmp_path: Path, mode: str, ending: str) -> None:
    source = Image.new("RGB", (9, 5), "white")
    source.paste((0, 0, 0), (0, 0, 4, 5))
    source.convert(mode).save(tmp_path / f"a.{ending}")
    picture = read_picture(tmp_path / f"a.{ending}")
    assert picture.alpha is None
    assert picture.image.convert("RGB").tobytes() == source.tobytes()


@pytest.mark.parametrize("mode", ["LA", "RGBA", "PA"])
def test_alpha_is_kept_beside_white(tmp_path: Path, mode: str) -> None:
    source = Image.new("RGBA", (4, 1), (0, 0, 0, 255))
    for x, alpha in enumerate((0, 128, 255)):
        source.putpixel((x, 0), (0, 0, 0, alpha))
    stored = source.convert(mode)
    if mode == "PA" and stored.convert("RGBA").tobytes() != source.tobytes():
        pytest.skip("Pillow before 10.1 makes no PA picture with alpha")
    ending = "tif" if mode == "PA" else "png"
    stored.save(tmp_path / f"a.{ending}")
    picture = read_picture(tmp_path / f"a.{ending}")
    assert [picture.image.getpixel((x, 0))[0] for x in range(3)] == [255, 127, 0]  # type: ignore[index]
    assert picture.alpha is not None
    assert picture.alpha.mode == "L"
    assert picture.alpha.tobytes() == bytes((0, 128, 255, 255))


@pytest.mark.parametrize(
    ("mode", "ending"),
    [("P", "png"), ("L", "png"), ("1", "png"), ("RGB", "png"), ("P", "gif")],
)
def test_a_transparent_colour(tmp_path: Path, mode: str, ending: str) -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([0, 0, 0, 255, 255, 255])
    image.putpixel((0, 0), 1)
    key: object = 0
    if mode != "P":
        image = image.convert(mode)
        key = (0, 0, 0) if mode == "RGB" else 0
    image.save(tmp_path / f"a.{ending}", transparency=key)
    picture = read_picture(tmp_path / f"a.{ending}")
    assert picture.alpha is not None
    assert picture.alpha.getpixel((3, 3)) == 0
    assert picture.alpha.getpixel((0, 0)) == 255
    assert picture.image.getpixel((3, 3)) == WHITE


def test_a_palette_with_partial_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([0, 0, 0] * 3)
    image.putdata([0, 1, 2])
    image.save(tmp_path / "a.png", transparency=bytes((0, 128, 255)))
    alpha = read_picture(tmp_path / "a.png").alpha
    assert alpha is not None
    assert alpha.tobytes() == bytes((0, 128, 255))


def test_an_opaque_alpha_is_dropped(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (1, 2, 3, 255)).save(tmp_path / "a.png")
    assert read_picture(tmp_path / "a.png").alpha is None


def test_lab_becomes_rgb(tmp_path: Path) -> None:
    lab = ImageCms.profileToProfile(
        Image.new("RGB", (4, 4), RED),
        ImageCms.createProfile("sRGB"),
        ImageCms.createProfile("LAB"),
        outputMode="LAB",
    )
    assert lab is not None
    lab.save(tmp_path / "a.tif")
    assert near(read_picture(tmp_path / "a.tif").image, (2, 2), RED, 6)


@pytest.mark.parametrize("ending", ["gif", "webp", "png", "tif"])
def test_of_an_animation_the_first_frame_is_read(tmp_path: Path, ending: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
    path = tmp_path / f"a.{ending}"
    options = {"lossless": True} if ending == "webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)
    picture = read_picture(path)
    assert near(picture.image, (8, 8), RED, 4)
    path.unlink()
    picture.image.resize((8, 8))


def test_avif(tmp_path: Path) -> None:
    if not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    exif = Image.Exif()
    exif[0x0112] = 6
    corners().transpose(Image.Transpose.ROTATE_90).save(tmp_path / "a.avif", exif=exif, quality=95)
    assert read_header(tmp_path / "a.avif").width_px == 48
    assert near(read_picture(tmp_path / "a.avif").image, (4, 4), RED, 40)


NOISE = Image.effect_noise((97, 61), 80).convert("RGB")
WRITERS: dict[str, dict[str, object]] = {
    "png": {},
    "jpg": {"quality": 90},
    "webp": {},
    "bmp": {},
    "tif": {},
    "lzw.tif": {"compression": "tiff_lzw"},
    "gif": {},
}
if features.check("avif"):
    WRITERS["avif"] = {}


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("part", [0.0, 0.002, 0.01, 0.1, 0.5, 0.9])
def test_a_picture_that_is_cut_off_is_refused(tmp_path: Path, ending: str, part: float) -> None:
    path = tmp_path / f"a.{ending}"
    NOISE.save(path, **WRITERS[ending])  # type: ignore[arg-type]
    whole = path.read_bytes()
    path.write_bytes(whole[: max(1, int(len(whole) * part))])
    with pytest.raises(PictureError) as caught:
        read_picture(path)
    assert caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("ending", WRITERS)
def test_damaged_bytes_never_raise_anything_else(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    NOISE.save(path, **WRITERS[ending])  # type: ignore[arg-type]
    whole = bytearray(path.read_bytes())
    for at in [*range(0, 120), *range(120, len(whole), max(1, len(whole) // 40))]:
        damaged = whole.copy()
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        for read in (read_header, read_picture):
            with contextlib.suppress(PictureError):
                read(path)  # type: ignore[operator]


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(PictureError, match="empty"):
        read_picture(tmp_path / "a.png")


def test_a_text_with_a_pictures_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(PictureError, match="readable: PNG, JPEG"):
        read_picture(tmp_path / "a.png")


def test_a_program_with_a_pictures_name_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    )
    with pytest.raises(PictureError, match="not a picture of a known format"):
        read_picture(tmp_path / "a.png")


def test_a_folder_with_a_pictures_name(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    with pytest.raises(PictureError, match="folder"):
        read_picture(tmp_path / "x.png")


class _OwnError(Exception):
    """Of a decoder that derives its errors from nothing known."""


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Failed to decode frame"), _OwnError(), RecursionError(), KeyError(b"\x1b[2J")],
)
@pytest.mark.parametrize("where", ["opening", "loading"])
def test_whatever_a_decoder_raises_is_a_broken_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    corners().save(tmp_path / "a.png")
    whole = Image if where == "opening" else PngImagePlugin.PngImageFile
    monkeypatch.setattr(whole, "open" if where == "opening" else "load", _raiser(error))
    with pytest.raises(PictureError, match="broken"):
        read_picture(tmp_path / "a.png")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="no such file"):
        read_header(tmp_path / "x.png")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(PictureError, match="not an ordinary file"):
        read_header(tmp_path / "x.png")


def _raiser(error: BaseException) -> Callable[..., object]:
    def raise_it(*_args: object, **_kwargs: object) -> object:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(13, "Permission denied"), "may not be read"),
        (OSError(5, "Input/output error"), "broken"),
        (MemoryError(), "not enough memory"),
    ],
)
def test_the_systems_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str
) -> None:
    # Tests may run as root, whom a file's permissions do not stop.
    corners().save(tmp_path / "a.png")
    monkeypatch.setattr(formats, "open_file", _raiser(error))
    with pytest.raises(PictureError, match=reason):
        read_header(tmp_path / "a.png")


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    body = (b"IDAT", zlib.compress(b"\0" * 100))
    (tmp_path / "a.png").write_bytes(png_with((b"IHDR", header), body, (b"IEND", b"")))
    with pytest.raises(PictureError, match="178 million"):
        read_header(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as some hosts do
    with pytest.raises(PictureError, match="60000x60000"):
        read_header(tmp_path / "a.png")


def test_a_text_bomb_is_refused_or_passed_over(tmp_path: Path) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("a", "x" * 80_000_000, zip=True)
    corners().save(tmp_path / "a.png", pnginfo=info)
    with contextlib.suppress(PictureError):
        read_picture(tmp_path / "a.png")


def test_only_our_formats_are_offered() -> None:
    assert {"PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"} <= set(formats.readable_formats())
    assert "EPS" not in formats.readable_formats()


def test_every_turn_undoes_itself() -> None:
    exif = Image.Exif()
    for orientation in TURNED:
        exif[0x0112] = orientation
        image = corners()
        turn = TURNED[orientation]
        turned = image.transpose(turn) if turn is not None else image
        turned.getexif()[0x0112] = orientation
        assert ImageOps.exif_transpose(turned).tobytes() == image.tobytes()

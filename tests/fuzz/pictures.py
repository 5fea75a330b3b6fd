"""Targets: pictures, PNG chunks, captions, infotext, names and sizing rules."""

from __future__ import annotations

import contextlib
import datetime
import io
import tempfile
import zlib
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from hypothesis import strategies as st
from PIL import Image, features

from onediff_ext.core.errors import OneDiffError, OptionError, PictureError, ShapeError
from onediff_ext.core.shapes import parse_sizes
from onediff_ext.pictures.canvas_sizes import fit_size
from onediff_ext.pictures.captions import read_caption
from onediff_ext.pictures.infotext_format import build_infotext, parse_infotext
from onediff_ext.pictures.naming import NameFacts, NameTemplate
from onediff_ext.pictures.picture_header import read_header
from onediff_ext.pictures.png_chunks import MAX_ALL_TEXTS_BYTES, read_png
from onediff_ext.pictures.reading import read_picture
from onediff_ext.pictures.size_rules import parse_size_rule
from tests.fuzz.strategies import MOST_CHARS, TEXTS, damaged, joined, png_chunk
from tests.fuzz.target import Target

FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM"]


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="onediff-fuzz-")
    _kept.append(folder)
    return Path(folder.name)


_kept: list[Any] = []


def file_of(content: bytes, name: str) -> Path:
    """A file with this content; the one before is gone."""
    path = _folder() / name
    path.write_bytes(content)
    return path


@cache
def _whole_pictures() -> list[bytes]:
    noise = Image.effect_noise((13, 9), 80)
    wholes = []
    for name in [*FORMATS, *(["AVIF"] if features.check("avif") else [])]:
        for mode in ("RGB", "RGBA") if name in ("PNG", "WEBP", "TIFF", "AVIF") else ("RGB",):
            exif = Image.Exif()
            exif[0x0112] = 6
            stream = io.BytesIO()
            noise.convert(mode).save(stream, name, **({"exif": exif} if name != "PPM" else {}))
            wholes.append(stream.getvalue())
    for mode in ("I;16", "P", "1", "LA"):
        stream = io.BytesIO()
        picture = noise.convert("L") if mode == "I;16" else noise.convert(mode)
        picture.convert("I;16" if mode == "I;16" else mode).save(stream, "PNG")
        wholes.append(stream.getvalue())
    return wholes


def _picture(content: bytes) -> None:
    path = file_of(content, "a.png")
    for read in (read_header, read_picture):
        with contextlib.suppress(PictureError):
            read(path)  # type: ignore[operator]


_CHUNKS = st.builds(
    lambda kind, body, times, good: png_chunk(kind, body, good=good) * times,
    st.sampled_from([b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"IDAT", b"IEND", b"IHDR", b"iCCP"]),
    st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda key, rest: key + b"\0" + rest,
            st.sampled_from([b"parameters", b"onediff_job", b"Raw profile type exif", b""]),
            st.one_of(
                st.binary(max_size=40),
                st.builds(
                    lambda size, head: head + zlib.compress(bytes(size)),
                    st.sampled_from([0, 10, 10**4, 5 * 2**20]),
                    st.sampled_from([b"\0", b"\0\0\0\0", b"\1\0\0\0"]),
                ),
            ),
        ),
    ),
    st.sampled_from([1, 1, 2, 60]),
    st.booleans(),
)


def _png(content: bytes) -> None:
    path = file_of(content, "b.png")
    found = read_png(path)
    assert sum(map(len, found.texts.values())) <= MAX_ALL_TEXTS_BYTES
    with contextlib.suppress(PictureError):
        read_header(path)


_PNGS = st.builds(
    lambda chunks, tail: b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + tail,
    st.lists(_CHUNKS, max_size=8),
    st.binary(max_size=12),
)


def _caption(content: bytes) -> None:
    file_of(content, "c.txt")
    with contextlib.suppress(PictureError):
        caption = read_caption(_folder() / "c.jpg")
        assert caption is None or caption == " ".join(caption.split())


def _infotext(text: str) -> None:
    found = parse_infotext(text)
    for name, value in found.fields.items():
        assert isinstance(name, str)
        assert isinstance(value, str)
    with contextlib.suppress(OptionError):
        written = build_infotext(found.prompt, found.negative_prompt, found.fields)
        if len(written) > MOST_CHARS // 2:
            return  # escaped, the fields may be longer than what is read
        again = parse_infotext(written)
        assert build_infotext(again.prompt, again.negative_prompt, again.fields) == written


def _name(value: list[Any]) -> None:
    template, stem, index, seed = value
    with contextlib.suppress(OptionError):
        made = NameTemplate(template)
        facts = NameFacts(Path(f"{stem}.jpg"), index, seed, 64, 64, datetime.date(2024, 1, 2))
        name = made.render(facts)
        parts = PurePosixPath(name).parts
        assert name.endswith(".png")
        assert not name.startswith("/")
        assert all(part not in ("", ".", "..") for part in parts)
        assert all(len(part.encode("utf-8")) <= 255 for part in parts)
        assert not set(name) & set('<>:"\\|?*\0\x1b')


def _sizes(text: str) -> None:
    with contextlib.suppress(ShapeError):
        shapes = parse_sizes(text)
        assert parse_sizes(", ".join(map(str, shapes))) == shapes


def _size_rule(value: list[Any]) -> None:
    text, width_px, height_px = value
    with contextlib.suppress(OneDiffError):
        rule = parse_size_rule(text)
        assert str(parse_size_rule(str(rule))) == str(rule)
        fit = fit_size(rule, width_px, height_px)
        assert fit.canvas_width_px % 8 == fit.canvas_height_px % 8 == 0
        assert fit.canvas_width_px * fit.canvas_height_px <= 4.2e6


_SIDES = st.one_of(st.integers(-1, 5000), st.sampled_from([2**31, 10**30]))

TARGETS = (
    Target("pictures", st.deferred(lambda: damaged(_whole_pictures())), _picture, limit_s=3),
    Target("png-chunks", _PNGS, _png, limit_s=4, limit_bytes=160 * 2**20),
    Target("captions", st.one_of(st.binary(max_size=99), TEXTS.map(lambda text: (
        text.encode("utf-8", "surrogatepass")
    ))), _caption),
    Target(
        "infotext",
        joined([
            "Negative prompt:", "Steps: 20", ", ", "\n", ": ", '"', "\\", "Size: 1x1", "ab: ", " ",
            "a", "\r", "\\\"", "Ab: \"", ",", "\t", "\n Negative prompt:", "\nab: 1, cd: 2, ef: 3",
        ]),
        _infotext,
    ),
    Target(
        "names",
        st.tuples(
            joined(["{stem}", "{index}", "{seed:", "}", "{", "/", "..", ":9", "04d", "\\", ".",
                    "!r", "{index:>", "9", "con"], 8),
            TEXTS.filter(bool), st.integers(0, 10**9), st.integers(0, 2**53),
        ).map(list),
        _name,
    ),
    Target(
        "sizes",
        joined(["512", "x", "64x64", "@", "2", ",", ";", " ", "\n", "×", "*", "X", "!", "0"]),
        _sizes,
    ),
    Target(
        "size-rules",
        st.tuples(
            joined(["own", "scale", "longest", "fixed", ":", "512", "x", "0.5", "crop", "shrink",
                    "e9", "1e308", "-", "nan", "inf"], 7),
            _SIDES, _SIDES,
        ).map(list),
        _size_rule,
    ),
)  # fmt: skip

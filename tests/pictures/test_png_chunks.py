"""The chunks of PNG files: order, limits and damage."""

from __future__ import annotations

import struct
import tempfile
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from onediff_ext.pictures.png_chunks import (
    MAX_ALL_TEXTS_BYTES,
    MAX_TEXT_BYTES,
    PngChunks,
    read_png,
)

IMAGE = Image.effect_noise((80, 60), 60).convert("RGB")


def test_chunks_of_what_is_no_png(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"GIF89a")
    assert read_png(path) == PngChunks()


def test_compressed_texts_are_read_and_damaged_ones_passed_over(tmp_path: Path) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("packed", "xyz" * 100, zip=True)
    info.add_itxt("wide", "猫" * 50, zip=True)
    info.add_text("broken", "broken text")
    info.add(b"zTXt", b"bad\0\0no zlib")
    IMAGE.save(tmp_path / "a.png", pnginfo=info)
    damaged = (tmp_path / "a.png").read_bytes().replace(b"broken text", b"brOken text")
    (tmp_path / "a.png").write_bytes(damaged)
    assert read_png(tmp_path / "a.png").texts == {"packed": "xyz" * 100, "wide": "猫" * 50}


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _png(*chunks: bytes) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    pixels = _chunk(b"IDAT", zlib.compress(b"\0\0"))
    return b"\x89PNG\r\n\x1a\n" + b"".join([header, *chunks, pixels, _chunk(b"IEND", b"")])


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"tEXt"])
def test_all_texts_together_have_a_limit(tmp_path: Path, kind: bytes) -> None:
    packed = zlib.compress(bytes(MAX_TEXT_BYTES - 1), 9)
    rest = {b"zTXt": b"\0" + packed, b"iTXt": b"\1\0\0\0" + packed, b"tEXt": bytes(2**20)}[kind]
    chunks = [_chunk(kind, b"key %d\0" % number + rest) for number in range(100)]
    ours = _chunk(b"tEXt", b"onediff_job\0d1")
    (tmp_path / "a.png").write_bytes(_png(ours, *chunks))
    tracemalloc.start()
    try:
        found = read_png(tmp_path / "a.png")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5 * MAX_ALL_TEXTS_BYTES
    assert sum(map(len, found.texts.values())) <= MAX_ALL_TEXTS_BYTES
    assert found.texts["onediff_job"] == "d1"
    assert found.is_complete


def test_a_text_over_the_limit_is_passed_over(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(MAX_TEXT_BYTES + 1), 9)
    chunks = [_chunk(b"zTXt", b"big\0\0" + bomb), _chunk(b"tEXt", b"small\0text")]
    (tmp_path / "a.png").write_bytes(_png(*chunks))
    assert read_png(tmp_path / "a.png").texts == {"small": "text"}


def test_chunks_without_end_are_not_walked_for_ever(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(_png(*[_chunk(b"teSt", b"")] * 600_000))
    start = time.process_time()
    assert not read_png(tmp_path / "a.png").is_complete
    assert time.process_time() - start < 10


def test_texts_are_found_before_and_after_the_pixels(tmp_path: Path) -> None:
    before, after = _chunk(b"tEXt", b"before\0a"), _chunk(b"tEXt", b"after\0b")
    whole = _png(before)
    (tmp_path / "a.png").write_bytes(whole[:-12] + after + whole[-12:])
    found = read_png(tmp_path / "a.png")
    assert found.texts == {"before": "a", "after": "b"}
    assert found.is_complete


def test_the_first_text_of_a_keyword_counts(tmp_path: Path) -> None:
    chunks = [_chunk(b"tEXt", b"key\0" + text) for text in (b"first", b"second")]
    (tmp_path / "a.png").write_bytes(_png(*chunks))
    assert read_png(tmp_path / "a.png").texts == {"key": "first"}


def test_texts_before_the_cut_of_a_truncated_file_are_kept(tmp_path: Path) -> None:
    whole = _png(_chunk(b"tEXt", b"key\0text"))
    for cut in range(whole.index(b"IDAT") + 4, len(whole)):
        (tmp_path / "a.png").write_bytes(whole[:cut])
        assert read_png(tmp_path / "a.png") == PngChunks(is_png=True, texts={"key": "text"})


@given(
    st.dictionaries(
        st.text("abcXYZ ", min_size=1, max_size=8).map(str.strip).filter(bool),
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40),
            st.booleans(),
        ),
        max_size=4,
    )
)
def test_intact_texts_are_those_that_pillow_reads(texts: dict[str, tuple[str, bool]]) -> None:
    info = PngImagePlugin.PngInfo()
    for keyword, (text, is_packed) in texts.items():
        info.add_text(keyword, text, zip=is_packed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.png"
        IMAGE.save(path, pnginfo=info)
        with Image.open(path) as image:
            assert isinstance(image, PngImagePlugin.PngImageFile)
            assert read_png(path).texts == image.text

"""The text and EXIF chunks of a PNG file, read without decoding its pixels.

Source: PNG (Portable Network Graphics) Specification, 3rd edition, chapters 5 and 11.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from onediff_ext.pictures.urls import open_file

JOB_KEYWORD = "onediff_job"
INFOTEXT_KEYWORD = "parameters"
SINGLE_PREFIX = "single:"
"""Begins the digest of a result that no folder of inputs was drawn to: it is never replaced."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXT_KINDS = (b"tEXt", b"zTXt", b"iTXt")
MAX_TEXT_BYTES = 4 * 2**20
MAX_ALL_TEXTS_BYTES = 16 * 2**20
"""Unpacked text of one file; further text chunks are skipped."""
MAX_CHUNKS = 500_000
"""The largest supported image has 175,000 chunks in libpng's pieces of 8 KiB."""
MAX_FILE_BYTES = 8 * 2**30
READ_LIMIT_S = 60.0


@dataclass(frozen=True)
class PngChunks:
    """The metadata of a PNG file.

    Args:
        is_png: The file has PNG's signature.
        is_complete: Every chunk is there in full length, up to and including the last (IEND).
        texts: Keyword → text of the intact text chunks; the first one of a keyword counts.
        exif: The EXIF block from its TIFF header on; empty without one.
    """

    is_png: bool = False
    is_complete: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    exif: bytes = b""


def read_png(path: Path) -> PngChunks:
    """Read a file's text and EXIF chunks; pixel data is skipped.

    Returns:
        The chunks found. For a truncated file these are the chunks before the cut, for another
        format none. A text of more than `MAX_TEXT_BYTES` is skipped.

    Raises:
        OSError: The file cannot be read.
        UnsafeFileError: It is not a regular file.
    """
    with open_file(path, limit_bytes=MAX_FILE_BYTES, limit_s=READ_LIMIT_S) as stream:
        size_bytes = stream.seek(0, 2)
        stream.seek(0)
        if stream.read(len(_SIGNATURE)) != _SIGNATURE:
            return PngChunks()
        return _walk(stream, size_bytes)


def _walk(stream: BinaryIO, size_bytes: int) -> PngChunks:
    texts: dict[str, str] = {}
    exif = b""
    pixels_seen = False
    room_bytes = MAX_ALL_TEXTS_BYTES
    for _ in range(MAX_CHUNKS):
        head = stream.read(8)
        if len(head) < 8:
            break
        length, kind = struct.unpack(">I4s", head)
        end = stream.tell() + length + 4
        if end > size_bytes or not kind.isalpha():
            break
        if kind == b"IEND":
            return PngChunks(True, pixels_seen and _body(stream, kind, 0) is not None, texts, exif)
        pixels_seen = pixels_seen or kind == b"IDAT"
        limit = min(MAX_TEXT_BYTES, room_bytes)
        if kind in _TEXT_KINDS and length <= limit:
            body = _body(stream, kind, length)
            keyword, text = (_text(kind, body, limit) if body is not None else None) or ("", None)
            # A text that is unpacked and then rejected costs time too, so it counts.
            room_bytes -= limit if text is None else max(length, len(text))
            if text is not None:
                texts.setdefault(keyword, text)
        elif kind == b"eXIf" and length <= MAX_TEXT_BYTES:
            exif = _body(stream, kind, length) or b""
        stream.seek(end)
    return PngChunks(True, False, texts, exif)


def _body(stream: BinaryIO, kind: bytes, length: int) -> bytes | None:
    """Read a chunk's body; None if its checksum is wrong."""
    body = stream.read(length)
    return body if stream.read(4) == struct.pack(">I", zlib.crc32(kind + body)) else None


def _text(kind: bytes, body: bytes, limit_bytes: int) -> tuple[str, str] | None:
    keyword, _, rest = body.partition(b"\0")
    try:
        if kind == b"tEXt":
            text = rest.decode("latin-1")
        elif kind == b"zTXt":
            text = _inflate(rest[1:], limit_bytes).decode("latin-1")
        else:
            is_compressed, rest = rest[:1] == b"\1", rest[2:]
            _language, _, rest = rest.partition(b"\0")
            _translated, _, rest = rest.partition(b"\0")
            text = (_inflate(rest, limit_bytes) if is_compressed else rest).decode("utf-8")
    except (zlib.error, UnicodeDecodeError):
        return None
    return keyword.decode("latin-1"), text


def _inflate(packed: bytes, limit_bytes: int) -> bytes:
    unpacked = zlib.decompressobj().decompress(packed, limit_bytes + 1)
    if len(unpacked) > limit_bytes:
        raise zlib.error("the text is too long")
    return unpacked

"""Writes a result into a file of its own: what other processes write at the same time stays."""

from __future__ import annotations

import contextlib
from pathlib import Path

from PIL import Image

from onediff_ext.core.errors import UnsafeFileError
from onediff_ext.pictures.naming import numbered
from onediff_ext.pictures.png_chunks import JOB_KEYWORD, SINGLE_PREFIX, read_png
from onediff_ext.pictures.urls import exists
from onediff_ext.pictures.writing import NameTakenError, write_png


def write_new_png(path: Path, image: Image.Image, *, infotext: str, digest: str) -> Path:
    """Write a PNG file that did not exist before.

    Args:
        path: The PNG file. If it is there already, the name becomes ``a-2.png``, ``a-3.png`` and so
            on.
        image, infotext: As for `write_png`.
        digest: Of all that decides this result. A file that has it is this result, written by a
            worker that was lost afterwards, and is not written again. May be empty. The file has
            it with `SINGLE_PREFIX`.

    Returns:
        The file.

    Raises:
        PictureError: It cannot be written.
    """
    number, free = 1, path
    marked = f"{SINGLE_PREFIX}{digest}"
    while True:
        if not exists(free):
            with contextlib.suppress(NameTakenError):
                write_png(free, image, infotext=infotext, digest=marked, replaces=False)
                return free
        elif digest and _has_digest(free, marked):
            return free
        number += 1
        free = path.with_name(numbered(path.name, number))


def _has_digest(path: Path, digest: str) -> bool:
    try:
        chunks = read_png(path)
    except (OSError, UnsafeFileError):
        return False  # somebody else's
    return chunks.is_complete and chunks.texts.get(JOB_KEYWORD) == digest

"""Captions: an image's own prompt in a text file beside it, as in training sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onediff_ext.core.errors import PictureError, UnsafeFileError
from onediff_ext.pictures.urls import open_file

SUFFIXES = (".txt", ".TXT")
MAX_BYTES = 256 * 1024
READ_LIMIT_S = 30.0
_HINT = "Save it as UTF-8 text, or leave --captions out."


def read_caption(picture: Path) -> str | None:
    """Return the text of ``cat.txt`` for ``cat.jpg`` as one line; None without a file or text.

    ``CAT.TXT`` is read too; ``.txt`` comes first.

    Raises:
        PictureError: The file cannot be read as text.
    """
    for suffix in SUFFIXES:
        text = _text_of(picture.with_suffix(suffix))
        if text is not None:
            return " ".join(text.split()) or None
    return None


def _text_of(path: Path) -> str | None:
    try:
        with open_file(path, limit_bytes=MAX_BYTES, limit_s=READ_LIMIT_S) as stream:
            return stream.read().decode("utf-8-sig")
    except FileNotFoundError:
        return None
    except UnsafeFileError as exc:
        raise PictureError(f"The caption cannot be read: {exc.message}", _HINT) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise PictureError(f"The caption {path} cannot be read.", _HINT) from exc


def is_caption(path: Path, stems: Mapping[str, int]) -> bool:
    """Whether a file of a folder is the caption of another one.

    Args:
        path: The file.
        stems: Stem → number of files in the folder with it, this file included.
    """
    return path.suffix in SUFFIXES and stems[path.stem] > 1

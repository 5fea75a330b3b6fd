"""The supported image formats, and opening a file as one of them.

Pillow may use these decoders only: its EPS decoder runs another program, and folders of photographs
do not need the others.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from onediff_ext.core.errors import OneDiffError, PictureError, UnsafeFileError
from onediff_ext.pictures.urls import open_file

# Twice Pillow's limit for a warning, where Pillow itself refuses. It is checked here too because a
# host may have switched off Pillow's limit.
MAX_PICTURE_PIXELS = 178_956_970

# That many uncompressed pixels with four 16-bit channels take 1.4 GB.
MAX_FILE_BYTES = 2 * 2**30
READ_LIMIT_S = 300.0

_SHOWN_CHARS = 200

FORMAT_OF_SUFFIX = {
    ".png": "PNG",
    ".apng": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jpe": "JPEG",
    ".jfif": "JPEG",
    ".mpo": "MPO",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".dib": "DIB",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".gif": "GIF",
    ".avif": "AVIF",
    ".jp2": "JPEG2000",
    ".ppm": "PPM",
    ".pgm": "PPM",
    ".pbm": "PPM",
}


def readable_formats() -> list[str]:
    """Return the formats above that the installed Pillow can decode."""
    Image.init()
    return [name for name in dict.fromkeys(FORMAT_OF_SUFFIX.values()) if name in Image.OPEN]


@contextmanager
def open_picture(path: Path) -> Iterator[Image.Image]:
    """Open an image; Pillow's errors in the block become a PictureError.

    The block must only load and convert the image: other errors would be reported as a broken
    image.

    Raises:
        PictureError: The file cannot be opened, is no image, is broken, or has more than
            `MAX_PICTURE_PIXELS` pixels.
    """
    with picture_errors():
        _refuse_no_file(path)
        with (
            open_file(path, limit_bytes=MAX_FILE_BYTES, limit_s=READ_LIMIT_S) as stream,
            Image.open(stream, formats=readable_formats()) as image,
        ):
            if image.width * image.height > MAX_PICTURE_PIXELS:
                raise _too_large(f"{image.width}x{image.height} pixels")
            yield image


@contextmanager
def picture_errors() -> Iterator[None]:
    """Turn every error of Pillow in the block into a PictureError.

    Pillow has many decoders, some of them from other projects. No list of their exceptions is
    complete, and one broken image must never end a run.
    """
    try:
        yield
    except UnsafeFileError as exc:
        raise PictureError(exc.message, "Copy the picture into a file of its own.") from exc
    except OneDiffError:
        raise
    except FileNotFoundError as exc:
        raise PictureError("There is no such file.", "Check the name.") from exc
    except PermissionError as exc:
        raise PictureError(
            "The file may not be read.", "Give yourself permission to read it."
        ) from exc
    except UnidentifiedImageError as exc:
        raise PictureError(
            "The file is not a picture of a known format, or its beginning is damaged.",
            f"Open it in an image editor and save it again; readable: {_formats_text()}.",
        ) from exc
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        raise _too_large("far too many pixels") from exc
    except MemoryError as exc:
        raise PictureError(
            "There is not enough memory to read the picture.",
            "Save a smaller copy, or close other programs.",
        ) from exc
    except Exception as exc:
        reason = " ".join(str(exc).split())[:_SHOWN_CHARS] or type(exc).__name__
        raise PictureError(
            f"The picture is broken or cut off ({reason}).",
            "Copy it again from where it came, or save it again in an image editor.",
        ) from exc


def _refuse_no_file(path: Path) -> None:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise PictureError("It is a folder, not a picture.", "Name it without a picture's ending.")
    if not stat.S_ISREG(status.st_mode):
        # opening a pipe would block
        raise PictureError("It is not an ordinary file.", "Copy the picture into a file.")
    if status.st_size == 0:
        raise PictureError("The file is empty.", "Copy it again from where it came.")


def _too_large(what: str) -> PictureError:
    return PictureError(
        f"The picture has {what}; more than {MAX_PICTURE_PIXELS // 10**6} million are not read.",
        "Save a smaller copy.",
    )


def _formats_text() -> str:
    return ", ".join(name for name in readable_formats() if name not in ("DIB", "MPO"))

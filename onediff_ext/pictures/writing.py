"""Writes a result as a PNG file: complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import time
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from onediff_ext.core.errors import PictureError
from onediff_ext.core.fault_points import reached
from onediff_ext.pictures.png_chunks import INFOTEXT_KEYWORD, JOB_KEYWORD
from onediff_ext.pictures.urls import (
    entries_of,
    errors_of_requests,
    is_url,
    try_folder,
    write_whole,
)

_HINTS = {
    errno.ENOSPC: "The disk is full: free some space and start the run again; it goes on here.",
    errno.EFBIG: "The disk or a limit takes no file this large: choose another output folder.",
    errno.EDQUOT: "Your disk quota is used up: free some space and start the run again.",
    errno.EROFS: "The disk is read-only: choose another output folder.",
    errno.EACCES: "Give yourself permission to write there, or choose another output folder.",
    errno.EPERM: "Give yourself permission to write there, or choose another output folder.",
    errno.ENOENT: "Choose another output folder.",
    errno.ENAMETOOLONG: "Use a shorter name template.",
    errno.ENOTDIR: "A file stands where a folder should: choose another output folder.",
    errno.EEXIST: "A file stands where a folder should: choose another output folder.",
    errno.EISDIR: "A folder stands where the picture should go: choose another name.",
}

_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.tmp")
# Another process may be writing here; a live writer's file is never this old.
_STALE_AGE_S = 120.0


class NameTakenError(PictureError):
    """A file that was to be a new one has come from elsewhere meanwhile."""


def write_png(
    path: Path,
    image: Image.Image,
    *,
    infotext: str,
    digest: str,
    alpha: Image.Image | None = None,
    compress_level: int = 4,
    replaces: bool = True,
) -> None:
    """Write a PNG file with its infotext and its job's digest.

    The file gets its name only when all of it is on the disk, and replaces an existing file in
    the same moment. Missing folders are made.

    Args:
        path: The PNG file.
        image: RGB image.
        infotext: For the ``parameters`` chunk, which the WebUI reads.
        digest: From `resume.job_digest`, for the ``onediff_job`` chunk.
        alpha: "L" image of the same size, written as transparency.
        compress_level: 0 (fast, large) to 9.
        replaces: An existing file is replaced. At a URL it always is.

    Raises:
        NameTakenError: Another process has written a file there, which stays.
        PictureError: The file cannot be written; no partial file stays.
    """
    chunks = PngInfo()
    chunks.add_text(INFOTEXT_KEYWORD, _encodable(infotext))
    chunks.add_text(JOB_KEYWORD, digest)
    if alpha is not None:
        image = image.copy()
        image.putalpha(alpha)
    unfinished = _unfinished(path.parent)
    if is_url(path):
        buffer = io.BytesIO()
        image.save(buffer, "PNG", pnginfo=chunks, compress_level=compress_level)
        try:
            write_whole(path, buffer.getvalue(), unfinished.name)
        except OSError as exc:
            raise _not_written(path, exc) from exc
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_through(unfinished, image, chunks, compress_level)
            if replaces:
                os.replace(unfinished, path)
            else:
                _publish_new(unfinished, path)
            reached("replaced")
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        _sync_folder(path.parent)
        reached("folder synced")
    except OSError as exc:
        raise _not_written(path, exc) from exc


def _publish_new(unfinished: Path, path: Path) -> None:
    try:
        os.link(unfinished, path)  # a rename would replace what another process has written
    except OSError as exc:
        if os.path.lexists(path):
            raise NameTakenError(f"{path} is there already.", "Choose another name.") from exc
        os.replace(unfinished, path)  # a disk without links
    else:
        unfinished.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder for results and check that it takes a file, before hours of work.

    Partial files of a killed run are deleted, but for those at a URL.

    Raises:
        PictureError: The folder cannot be made or written to.
    """
    trial = _unfinished(folder)
    try:
        if is_url(folder):
            try_folder(folder, trial.name)
            return
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as exc:
        raise _not_written(folder, exc) from exc
    for found in folder.glob(".*.tmp"):
        if _UNFINISHED.fullmatch(found.name):
            _remove_if_old(found)


def _remove_if_old(path: Path) -> None:
    with contextlib.suppress(OSError):  # just finished, or another user's
        if time.time() - path.stat().st_mtime > _STALE_AGE_S:
            path.unlink()


def remove_unfinished(folder: Path, run: str) -> int:
    """Delete the partial files of a run whose writers have all ended; return their number.

    Args:
        folder: The folder of the results.
        run: As in `unfinished_names`.
    """
    found: list[Path] = []
    with contextlib.suppress(OSError):  # what a server does not list stays
        names = [entry.path for entry in entries_of(folder)]
        found = [path for path in names if path.name.startswith(f".{run}")]
    found = [path for path in found if _UNFINISHED.fullmatch(path.name)]
    for path in found:
        with contextlib.suppress(OSError), errors_of_requests(path):
            path.unlink()
    return len(found)


class _UnfinishedNames:
    """How partial files are called in this process."""

    run = ""


unfinished_names = _UnfinishedNames()
"""Its `run`, up to 8 hexadecimal digits, begins the names of partial files, so that those of a
killed process are known as its run's."""


def _unfinished(folder: Path) -> Path:
    run = unfinished_names.run
    return folder / f".{run}{secrets.token_hex(8)[len(run) :]}.tmp"


def _not_written(path: Path, exc: OSError) -> PictureError:
    hint = _HINTS.get(exc.errno or 0, "Check the disk, or choose another output folder.")
    return PictureError(f"{path} cannot be written ({exc.strerror or exc}).", hint)


def _write_through(path: Path, image: Image.Image, chunks: PngInfo, compress_level: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    # Not tempfile: its files stay readable by their owner only.
    with os.fdopen(os.open(path, flags, 0o666), "wb") as stream:
        reached("opened")
        image.save(stream, "PNG", pnginfo=chunks, compress_level=compress_level)
        stream.flush()
        reached("wrote")
        os.fsync(stream.fileno())
        reached("synced")


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where the system supports that."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # some network disks refuse; the file itself is safe
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _encodable(text: str) -> str:
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")

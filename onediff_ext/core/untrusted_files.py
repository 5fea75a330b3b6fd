"""The reader for all files from untrusted sources.

A path may name an endless device, a FIFO without a writer, or a link. This reader never waits for
such a file: it checks the file's type, opens it without blocking, and checks again. Regular files
have limits in bytes and seconds.

Time is checked between reads. A single read call that never returns, on a network disk, cannot be
interrupted: systems offer no way to do that.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from onediff_ext.core.errors import SlowFileError, UnsafeFileError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_READ_BYTES = 8 << 20  # per read call; the clock is checked between calls
_BUFFER_BYTES = 128 << 10
# Windows lacks most of these flags.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOINHERIT", 0)
)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(
    path: Path,
    *,
    limit_bytes: int,
    limit_s: float | None = None,
    follow_links: bool = True,
) -> BinaryIO:
    """Open a regular file for reading.

    The file object also raises UnsafeFileError, when the file yields more than `limit_bytes` (it
    may grow, and files in `/proc` report no size) or reading takes longer than `limit_s`.

    Args:
        path: The file.
        limit_bytes: The largest sensible size of this kind of file.
        limit_s: Seconds from now for all reading; None for no limit here.
        follow_links: Whether the path may be a link to a regular file.

    Raises:
        UnsafeFileError: The path is not a regular file, is too large, or is not a valid name.
        OSError: The file does not exist or cannot be read.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        # Check before opening: opening alone moves some devices.
        _refuse_irregular(path, path.stat() if follow_links else path.lstat())
        descriptor = os.open(path, _FLAGS if follow_links else _FLAGS | _NO_FOLLOW)
    except ValueError as exc:  # a NUL or other characters that file names cannot have
        raise UnsafeFileError(f"{str(path)!r} is no name of a file.", "Name another.") from exc
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise UnsafeFileError(
                f"{path} is a link that leads to no file.", "Name the file itself."
            ) from exc
        if exc.errno == errno.ENXIO:
            raise _irregular(path, "a pipe or a socket") from exc
        raise
    try:
        status = os.fstat(descriptor)
        _refuse_irregular(path, status)
        if status.st_size > limit_bytes:
            raise _too_large(path, limit_bytes)
        raw = _BoundedFile(descriptor, path, limit_bytes, deadline)
    except BaseException:
        os.close(descriptor)
        raise
    return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))


def read_regular(
    path: Path,
    *,
    limit_bytes: int,
    limit_s: float | None = None,
    follow_links: bool = True,
) -> bytes:
    """Return the bytes of a regular file; see `open_regular`."""
    with open_regular(
        path, limit_bytes=limit_bytes, limit_s=limit_s, follow_links=follow_links
    ) as file:
        return file.read()


def other_kind(path: Path) -> str:
    """Say what a name stands for that is no regular file; "" for a regular file or nothing.

    Writing a new file in its place would take a device, or a link such as /dev/stdout, away from
    the whole machine.

    Returns:
        Such as "a folder", "a link" or "a device".
    """
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):
        return ""  # writing says what is wrong with the name
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


class _BoundedFile(io.RawIOBase):
    """A raw file that raises beyond its size limit or its deadline."""

    def __init__(
        self, descriptor: int, path: Path, limit_bytes: int, deadline: float | None
    ) -> None:
        super().__init__()
        self._file = io.FileIO(descriptor, "rb")
        self._path, self._limit_bytes, self._deadline = path, limit_bytes, deadline

    @property
    def name(self) -> str:
        return str(self._path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise SlowFileError(
                f"{self._path} takes too long to read.", "Copy it to a faster disk."
            )
        # One byte beyond the limit shows that the file is larger.
        room = max(1, self._limit_bytes + 1 - self._file.tell())
        count = self._file.readinto(memoryview(buffer).cast("B")[: min(room, _READ_BYTES)])
        if count is None:  # a regular file always has data or an end
            raise _irregular(self._path, "a pipe")
        if count and self._file.tell() > self._limit_bytes:
            raise _too_large(self._path, self._limit_bytes)
        return count

    def readall(self) -> bytes:
        parts, buffer = [], bytearray(min(_READ_BYTES, self._limit_bytes + 1))
        while count := self.readinto(buffer):
            parts.append(bytes(buffer[:count]))
        return b"".join(parts)

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            super().close()


def _refuse_irregular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _irregular(path, _KINDS.get(stat.S_IFMT(status.st_mode), "something else"))


def _irregular(path: Path, what: str) -> UnsafeFileError:
    return UnsafeFileError(f"{path} is {what}, not a file.", "Name a file.")


def _too_large(path: Path, limit_bytes: int) -> UnsafeFileError:
    size = f"{limit_bytes / 1e6:.0f} MB" if limit_bytes >= 1_000_000 else f"{limit_bytes} bytes"
    return UnsafeFileError(
        f"{path} is larger than a file of its kind may be ({size}).", "Name another file."
    )

"""The one reader for files that somebody else may have made.

A name may belong to a device without an end, to a FIFO that nobody writes to, or to a link.
Nothing here waits for such a file: it is looked at before it is opened, opened without
blocking, and looked at again. Regular files have limits in bytes and seconds.

The seconds are counted between reads: a network disk that never answers one read call is
not cut short, since systems offer nothing for that.
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

_READ_BYTES = 8 << 20  # of one read call; the clock is looked at between two
_BUFFER_BYTES = 128 << 10
# Windows has none of the first four; they count as absent there.
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

    The file object raises UnsafeFileError too, when more than `limit_bytes` come out of the
    file (it may grow, and files of `/proc` name no size) or reading takes over `limit_s`.

    Args:
        limit_bytes: The largest file of this kind that makes sense.
        limit_s: Seconds from now for all reading; None when the caller keeps the time.
        follow_links: Whether the name may be a link to a regular file.

    Raises:
        UnsafeFileError: It is something else, too large, or no name of a file.
        OSError: There is no such file, or it cannot be read.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        # Looked at first, since opening alone moves some devices.
        _refuse_irregular(path, path.stat() if follow_links else path.lstat())
        descriptor = os.open(path, _FLAGS if follow_links else _FLAGS | _NO_FOLLOW)
    except ValueError as exc:  # a NUL, or characters that no file name can have
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
    """A file that has no bytes past its limit, and no time past its deadline."""

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
        # One byte past the limit shows that there is more.
        room = max(1, self._limit_bytes + 1 - self._file.tell())
        count = self._file.readinto(memoryview(buffer).cast("B")[: min(room, _READ_BYTES)])
        if count is None:  # only what is no true file has nothing "for now"
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

"""Durable writes: bytes that survive a power failure."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from onediff_ext.core.fault_points import reached

# One os.write takes at most 2 GiB on Linux and macOS.
_WRITE_BYTES = 8 << 20


def write_and_sync(path: Path, chunks: Iterable[bytes]) -> None:
    """Create a file that only this user can read, and wait until it is on the disk.

    Args:
        path: The new file.
        chunks: Its content.

    Raises:
        FileExistsError: There is such a file already.
        OSError: It cannot be written. An incomplete file stays.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        reached("opened")
        for chunk in chunks:
            left = memoryview(chunk)
            while left:
                left = left[os.write(descriptor, left[:_WRITE_BYTES]) :]
            reached("wrote")
        os.fsync(descriptor)
        reached("synced")
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, where the system offers that.

    Args:
        folder: One in which files were made, renamed or deleted.

    Raises:
        OSError: The system failed to do it.
    """
    if os.name == "nt":
        return  # Windows opens no folder; NTFS journals names by itself
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(descriptor)

"""Maps the system's write errors to the store's errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onediff_ext.core.errors import StoreError, StoreFullError, StoreReadOnlyError
from onediff_ext.store.default_root import ROOT_VARIABLE

# EFBIG: the file system (FAT32) or a limit (ulimit -f) does not allow so large a file.
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def mapped_write_errors(path: Path) -> Iterator[None]:
    """Raise a StoreError with a hint for an OSError within the ``with`` block.

    Args:
        path: The file that is written.

    Raises:
        StoreFullError: There is no space left, or the file is too large for its disk.
        StoreReadOnlyError: The file or its folder cannot be written.
        StoreError: Another error of the system.
    """
    try:
        yield
    except OSError as exc:
        raise _mapped(exc, path) from exc


def _mapped(exc: OSError, path: Path) -> StoreError:
    if exc.errno in _FULL:
        return StoreFullError(
            # Names the folder and not the file, so that a hundred graphs cause one message.
            f"There is no space left in {path.parent.absolute()}.",
            "Free some disk space, or shrink the store with `onediff-ext graphs prune`.",
        )
    if exc.errno in _READ_ONLY:
        return StoreReadOnlyError(
            f"{path} cannot be written ({exc.strerror}).",
            f"Make the folder writable, or set {ROOT_VARIABLE} to one that is.",
        )
    return StoreError(
        f"{path} could not be written ({exc.strerror or exc}).",
        f"Check the folder and its disk, or set {ROOT_VARIABLE} to another folder.",
    )

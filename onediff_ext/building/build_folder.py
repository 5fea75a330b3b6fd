"""The temporary folder of build workers, deleted even after its owner was killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from onediff_ext.core.errors import BackendError, StoreError
from onediff_ext.core.ownership import may_be_swapped
from onediff_ext.store.folder import StoreFolder

_PREFIX = "onediff-build-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as mkdtemp makes them
# Held by a worker that outlives the folder's owner, in its own part of the folder. The owner makes
# the file, and the worker takes the lock as soon as it is told.
ALONE_LOCK = "alone.lock"
_TAKEN_WITHIN_S = 60.0
# A folder gets its lock a moment after it was made. One without a lock after so long is stale.
_MAKING_S = 2.0


def remove_stale(parent: Path | None = None) -> None:
    """Delete build folders whose owners are dead; folders of other users stay.

    Args:
        parent: The folder that holds them; None is the system's temporary folder.
    """
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        with contextlib.suppress(Timeout, OSError):
            # Other users may make a folder of this name, with a lock that links to a file of ours.
            if not _is_ours_alone(folder):
                continue
            lock = _lock_of(folder)
            if not Path(lock.lock_file).exists() and not _is_abandoned(folder):
                continue  # being made right now, or not ours
            lock.acquire(timeout=0)
            lock.release()
            if not any(_is_in_use(each) for each in folder.glob(f"*/{ALONE_LOCK}")):
                _remove(folder)


def safe_parent(store: StoreFolder) -> Path:
    """Choose where build folders are made: the system's temporary folder, else the store.

    In a folder that all users may write, without the sticky bit, others can swap what a worker
    compiles.

    Args:
        store: The store.

    Returns:
        The parent folder of build folders.

    Raises:
        BackendError: Neither is safe.
    """
    parent = Path(tempfile.gettempdir())
    try:
        if not may_be_swapped(parent):
            return parent
        store.prepare()
        return store.tmp
    except (OSError, StoreError) as exc:
        raise BackendError(
            f"Others may change what is built in {parent}.",
            f"Run `chmod +t {parent}` as its owner, or set TMPDIR to a folder of your own.",
        ) from exc


class BuildFolder:
    """A temporary folder with a lock that the system frees when its owner dies.

    A new build folder removes those of dead owners.

    Args:
        parent: Where it is made; None is the system's temporary folder.

    Attributes:
        path: The folder.

    Raises:
        BackendError: It cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        try:
            remove_stale(parent)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = _lock_of(self.path)
            self._lock.acquire(timeout=0)
        except OSError as exc:
            raise BackendError(
                f"No folder for building can be made ({exc.strerror or exc}).",
                "Free some space, or set TMPDIR to another folder.",
            ) from exc

    def leave(self) -> None:
        """Leave the folder to workers that go on alone; the last of them deletes it."""
        self._lock.release()
        remove_stale(self.path.parent)  # they may have ended before

    def remove(self) -> None:
        """Delete the folder; waits up to 1 s for processes that still write there."""
        self._lock.release()
        _remove(self.path)


def _is_in_use(alone_lock: Path) -> bool:
    if time.time() - alone_lock.stat().st_mtime < _TAKEN_WITHIN_S:
        return True
    lock = FileLock(alone_lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def _is_ours_alone(folder: Path) -> bool:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return False
    return sys.platform == "win32" or (
        status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _is_abandoned(folder: Path) -> bool:
    try:
        age_s = time.time() - folder.stat().st_mtime
        return age_s > _MAKING_S and _NAME.fullmatch(folder.name) is not None
    except OSError:
        return False  # just removed


def _lock_of(folder: Path) -> BaseFileLock:
    return FileLock(folder / "owner.lock")


def _remove(folder: Path) -> None:
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)

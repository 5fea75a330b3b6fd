"""Atomic writes: a file of the store appears whole or not at all.

The bytes go to a part file in `tmp/` and are synced; one `os.replace` publishes them. The writer
holds a lock with the part's name, so a part with a free lock belongs to a dead writer.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from onediff_ext.core.fault_points import reached
from onediff_ext.store.durable_write import sync_folder, write_and_sync
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.write_errors import mapped_write_errors

# For disks whose locks do not work. With working locks, the age does not matter.
STALE_PART_AGE_S = 600.0
_PART_LOCK_TIMEOUT_S = 10.0
_REPLACE_TRIES = 50
_REPLACE_WAIT_S = 0.02


def publish(folder: StoreFolder, target: Path, chunks: Iterable[bytes]) -> None:
    """Write a file of the store, replacing an earlier one.

    Args:
        folder: The store.
        target: The file, inside the store.
        chunks: Its content.

    Raises:
        StoreFullError, StoreReadOnlyError, StoreError: The file is unchanged.
    """
    folder.prepare()
    reached("prepared")
    token = f"{os.getpid()}-{secrets.token_hex(8)}"
    part = folder.tmp / f"{token}.part"
    with folder.locks.hold(_lock_name(part), _PART_LOCK_TIMEOUT_S), mapped_write_errors(target):
        try:
            write_and_sync(part, chunks)
            _replace(folder, part, target)
            reached("replaced")
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)
        reached("folder synced")


def collect_stale_parts(folder: StoreFolder, age_s: float = STALE_PART_AGE_S) -> int:
    """Delete the parts of dead writers.

    Args:
        folder: The store.
        age_s: Younger parts stay, in seconds.

    Returns:
        The number of deleted parts.
    """
    removed = 0
    for part in folder.tmp.glob("*.part"):
        try:
            old = time.time() - part.lstat().st_mtime >= age_s
        except FileNotFoundError:
            continue
        if old:
            removed += folder.locks.if_free(_lock_name(part), partial(_remove, part))
    return removed


def _lock_name(part: Path) -> str:
    return f"write-{part.stem}"


def _remove(part: Path) -> None:
    with mapped_write_errors(part):
        part.unlink(missing_ok=True)


def _replace(folder: StoreFolder, part: Path, target: Path) -> None:
    for tries_left in reversed(range(_REPLACE_TRIES)):
        try:
            with folder.locks.guard():
                os.replace(part, target)
        except PermissionError:
            # Windows refuses for the moment in which another process reads the old file.
            if os.name != "nt" or not tries_left:
                raise
            time.sleep(_REPLACE_WAIT_S)
        else:
            return

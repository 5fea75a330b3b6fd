"""A file of the store appears whole or not at all.

The bytes go to a file in `tmp/`, are synced, and one `os.replace` publishes them.
While a part is being written, a lock of its own name is held: whoever finds a part
whose lock is free knows that its writer is dead.
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

# With working locks any age would do; this is for disks whose locks do not work.
STALE_PART_AGE_S = 600.0
_PART_LOCK_TIMEOUT_S = 10.0
_REPLACE_TRIES = 50
_REPLACE_WAIT_S = 0.02


def publish(folder: StoreFolder, target: Path, chunks: Iterable[bytes]) -> None:
    """Write `target`, which lies in `folder`, replacing what was there.

    Raises:
        StoreFullError, StoreReadOnlyError, StoreError: Nothing has changed.
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
    """Remove the parts of dead writers that are older than `age_s`; return how many."""
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
            # Windows refuses while another process reads the old file: a moment.
            if os.name != "nt" or not tries_left:
                raise
            time.sleep(_REPLACE_WAIT_S)
        else:
            return

"""Permissions of the store. Graphs are native code, so other users must not add or change any.

The user's own folders lose the write permission of others. A folder of another user, or a graph
file that others own or may write, is refused with the command that fixes it. A file is judged by
its open descriptor, so swapping its folder in between has no effect.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

from onediff_ext.core.errors import UntrustedGraphError
from onediff_ext.core.ownership import foreign_owner, other_writers, owners_beside_us
from onediff_ext.store.default_root import ROOT_VARIABLE

TRUST_VARIABLE = "ONEDIFF_TRUST_STORE"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def secure_folder(folder: Path, *, holds_code: bool) -> None:
    """Remove the write permission of other users from a folder, if needed and possible.

    Args:
        folder: The folder; a missing one is fine.
        holds_code: Whether files directly in it are loaded or believed. The store's root may stay
            writable where permissions cannot change, since its content is checked separately.

    Raises:
        UntrustedGraphError: It belongs to another user, or others may still write it.
    """
    if sys.platform == "win32":
        return
    try:
        status = folder.stat()
    except OSError:
        return  # missing or unreadable: its use raises the error
    owner = _foreign_owner(status, folder)
    if owner and not _is_trusted(folder):
        raise UntrustedGraphError(
            f"{folder} belongs to {owner}.",
            f"If you trust what is in it, run `sudo chown -R {os.geteuid()} '{folder}'` or set "
            f"{TRUST_VARIABLE} to the store's folder; else set {ROOT_VARIABLE} to another one.",
        )
    if not other_writers(status) or status.st_mode & stat.S_ISVTX:
        return
    with contextlib.suppress(OSError):
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
        status = folder.stat()
    writers = other_writers(status)
    if writers and holds_code and not _is_trusted(folder):
        raise UntrustedGraphError(
            f"{folder} may be written by {writers}.",
            f"Run `chmod go-w '{folder}'` as its owner. On a disk that keeps no permissions, set "
            f"{ROOT_VARIABLE} to another folder, or {TRUST_VARIABLE} to this store's.",
        )


def not_ours_reason(path: Path, status: os.stat_result) -> str:
    """Return why the content of a file may come from another user.

    Args:
        path: The file.
        status: The status of its open descriptor.

    Returns:
        ``""`` when only this user can write it.
    """
    owner, writers = _foreign_owner(status, path.parent), other_writers(status)
    if not (owner or writers) or _is_trusted(path):
        return ""
    return f"the file belongs to {owner}" if owner else f"the file may be written by {writers}"


def _foreign_owner(status: os.stat_result, folder: Path) -> str:
    # The disk is only asked when the owner is another user.
    return foreign_owner(status) and foreign_owner(status, owners_beside_us(folder))


def _is_trusted(path: Path) -> bool:
    """Whether the user trusts the store of `path`, as with git's safe.directory."""
    chosen = os.environ.get(TRUST_VARIABLE)
    if not chosen:
        return False
    trusted, real = os.path.realpath(chosen), os.path.realpath(path)
    return real == trusted or real.startswith(os.path.join(trusted, ""))

"""Graphs are native code: nobody else may put one into the store, or change one there.

Folders of ours that others may write are closed to them. A folder of somebody else, or a graph
file that others own or may write, is refused with the command that mends it. A file is judged by
its open descriptor, so that a folder that is swapped in between gains nothing.
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
    """Close a folder to other writers, if that is needed and possible; a missing one is fine.

    Args:
        holds_code: Whether what lies directly in it is loaded or believed. The store's root may
            stay open to others where it cannot be closed: what is in it is checked by itself.

    Raises:
        UntrustedGraphError: It belongs to another user, or others may write it.
    """
    if sys.platform == "win32":
        return
    try:
        status = folder.stat()
    except OSError:
        return  # not there, or not to be looked into: using it says so
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


def why_not_ours(path: Path, status: os.stat_result) -> str:
    """Say why the content of a file may come from somebody else; "" when only we can write it.

    Args:
        path: Its name.
        status: Of its open descriptor.
    """
    owner, writers = _foreign_owner(status, path.parent), other_writers(status)
    if not (owner or writers) or _is_trusted(path):
        return ""
    return f"the file belongs to {owner}" if owner else f"the file may be written by {writers}"


def _foreign_owner(status: os.stat_result, folder: Path) -> str:
    # The disk is asked only when there is a doubt.
    return foreign_owner(status) and foreign_owner(status, owners_beside_us(folder))


def _is_trusted(path: Path) -> bool:
    """Whether the user vouches for the store that `path` lies in, as for git's safe.directory."""
    chosen = os.environ.get(TRUST_VARIABLE)
    if not chosen:
        return False
    trusted, real = os.path.realpath(chosen), os.path.realpath(path)
    return real == trusted or real.startswith(os.path.join(trusted, ""))

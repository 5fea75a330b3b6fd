"""Which other users may change a file or folder, as git checks repositories and pip its cache.

On POSIX systems the owner and the permission bits decide. Windows has neither, so nothing is
checked there; the access list of the user's profile folder keeps others out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
import tempfile
from pathlib import Path

_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def foreign_owner(status: os.stat_result, known: frozenset[int] = frozenset()) -> str:
    """Return a foreign owner, such as "user 1005"; "" when this user or root owns the file.

    Args:
        status: Of the file or folder.
        known: More user ids that count as this user; see `owners_beside_us`.
    """
    if sys.platform == "win32" or status.st_uid in {os.geteuid(), 0, *known, *_before_sudo()}:
        return ""
    return f"user {_user_name(status.st_uid)}"


def other_writers(status: os.stat_result) -> str:
    """Return who may write besides the owner: "everybody", "group video" or "".

    A private group with the user as its only member (umask 0002) counts as the user; root's group
    counts as root.
    """
    if sys.platform == "win32":
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, status.st_uid):
        return f"group {_group_name(status.st_gid)}"
    return ""


def may_be_swapped(folder: Path) -> bool:
    """Whether another user may replace a file or folder in `folder`."""
    status = folder.stat()
    if foreign_owner(status):
        return True
    return not status.st_mode & stat.S_ISVTX and other_writers(status) != ""


def owners_beside_us(folder: Path) -> frozenset[int]:
    """Return further user ids that count as this user on the disk of `folder`.

    A network share may assign all our files to one fixed user (`root_squash`, `uid=`); a temporary
    file shows which. For root in a container, the owner of a mounted `folder` counts as root; other
    users of the host stay foreign.
    """
    if sys.platform == "win32":
        return frozenset()
    found = set()
    with contextlib.suppress(OSError):
        with tempfile.TemporaryFile(dir=folder) as made:
            found.add(os.fstat(made.fileno()).st_uid)
        if os.geteuid() == 0 and any(mark.exists() for mark in _CONTAINER_MARKS):
            found.add(folder.stat().st_uid)
    return frozenset(found)


def _before_sudo() -> tuple[int, ...]:
    """Return the user who became root by sudo; that user is trusted too, as in git."""
    before = os.environ.get("SUDO_UID", "")
    return (int(before),) if before.isdecimal() and os.geteuid() == 0 else ()


def _is_private_group(gid: int, owner: int) -> bool:
    if gid == 0:
        return True
    import grp
    import pwd

    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return gid == owner  # `docker run --user 1000:1000` has no user names
    try:
        user = pwd.getpwuid(owner)
    except KeyError:
        return False
    same = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return same and _has_one_user(gid, user.pw_name)


@functools.lru_cache(maxsize=16)
def _has_one_user(gid: int, name: str) -> bool:
    import pwd

    return all(user.pw_name == name for user in pwd.getpwall() if user.pw_gid == gid)


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)

"""Who else may change a file or folder: what git asks of a repository and pip of its cache.

On POSIX systems the owner and the permission bits decide. Windows has neither: there nothing is
checked, and the user's profile folder keeps others out by its access list.
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
    """Say who owns a file, such as "user 1005"; "" when it is this user or root.

    Args:
        status: Of the file or folder.
        known: Other user ids that are this user's too; see `owners_beside_us`.
    """
    if sys.platform == "win32" or status.st_uid in {os.geteuid(), 0, *known, *_before_sudo()}:
        return ""
    return f"user {_user_name(status.st_uid)}"


def other_writers(status: os.stat_result) -> str:
    """Say who may write beside the owner: "everybody", "group video" or "".

    The group that many systems give each user alone (umask 0002) counts as the user, the group of
    root as root.
    """
    if sys.platform == "win32":
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, status.st_uid):
        return f"group {_group_name(status.st_gid)}"
    return ""


def may_be_swapped(folder: Path) -> bool:
    """Whether somebody else may put another file or folder in place of one in `folder`."""
    status = folder.stat()
    if foreign_owner(status):
        return True
    return not status.st_mode & stat.S_ISVTX and other_writers(status) != ""


def owners_beside_us(folder: Path) -> frozenset[int]:
    """User ids that are ours on the disk of `folder`, though they are not this process's.

    A network share may give each of our files to one fixed user (`root_squash`, `uid=`): a file
    made here shows it. Root in a container takes the owner of `folder`, a folder of the host that
    was put into the container, for itself: other users of the host stay others.
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
    """As git does: root that a user became by sudo trusts that user, and no more than before."""
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
        return gid == owner  # `docker run --user 1000:1000` has no names at all
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

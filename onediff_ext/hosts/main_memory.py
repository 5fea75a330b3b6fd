"""How much main memory can be used, also where a container has less than its machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def main_memory_available() -> int:
    """Return the bytes of main memory that can be used without swapping; 0 if nothing tells."""
    try:
        import psutil  # a dependency of the hosts that move models
    except ImportError:
        return 0
    try:
        available_bytes = int(psutil.virtual_memory().available)
    except OSError:
        return 0
    return min([available_bytes, *limits_of_cgroups(_PROCESS, _CGROUPS)])


def limits_of_cgroups(process: Path, cgroups: Path) -> list[int]:
    """Return what each control group of this process has left, in bytes.

    Containers limit memory by control groups. Neither psutil nor the kernel's own figures of free
    memory know of them. A group's file cache counts as free, since the kernel gives it up first.

    Args:
        process: ``/proc/self/cgroup``; it need not exist.
        cgroups: Where control groups are mounted.
    """
    try:
        lines = process.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            names, root = ("memory.max", "memory.current", ""), cgroups
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            root = cgroups / "memory"
        else:
            continue
        found = [_left(folder, *names) for folder in _folders(root, path)]
        left += [each for each in found if each >= 0]
    return left


def _folders(root: Path, path: str) -> Iterator[Path]:
    """A group's folder and those of the groups around it.

    Inside of a container, the path may be that of the machine, and the root the container's own.
    """
    parts = PurePosixPath(path).parts[1:]
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


def _left(folder: Path, limit: str, usage: str, prefix: str) -> int:
    """The bytes that a group has left; -1 without a limit."""
    try:
        limit_bytes = int((folder / limit).read_text(encoding="utf-8"))
        used_bytes = int((folder / usage).read_text(encoding="utf-8"))
        statistics = dict(
            line.split()
            for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        cache_bytes = sum(
            int(statistics.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file")
        )
        return max(0, limit_bytes - used_bytes + cache_bytes)
    except (OSError, ValueError):  # no such group, "max"
        return -1

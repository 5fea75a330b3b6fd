"""Lets a forked process go of the files, sockets and GPUs that its parent has open.

A port stays in use, a lock held, and a GPU's memory taken, until the last process has ended that
has them open or, for device files, mapped.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_GPUS = "/dev/nvidia"


def let_go_of_inherited(keep: int) -> None:
    """Put the null device in the place of each open file, and unmap GPUs.

    Their numbers stay taken: a log file's number must not become that of a new file. CUDA cannot be
    used afterwards.

    Args:
        keep: A descriptor that stays as it is.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        if descriptor not in (keep, nothing):
            os.dup2(nothing, descriptor, inheritable=descriptor <= 2)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in maps.splitlines():
        if f" {_GPUS}" in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            libc.munmap(start, end - start)

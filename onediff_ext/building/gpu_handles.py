"""Closes what a forked process has inherited of its parent's GPUs.

The driver frees a process's GPU memory when the last process that has its device files open, or
mapped, has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_DEVICES = "/dev/nvidia"


def close_gpu_handles() -> None:
    """Close device files of NVIDIA GPUs, and unmap them. CUDA cannot be used afterwards."""
    own = Path("/proc/self")
    for link in list((own / "fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed already
            if str(link.readlink()).startswith(_DEVICES):
                os.close(int(link.name))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    for line in (own / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if f" {_DEVICES}" in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            libc.munmap(start, end - start)

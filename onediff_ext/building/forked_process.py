"""Forks this process, and prepares the copy for work of its own (Linux).

torch's own DataLoader forks beside CUDA in the same way. The copy cannot reach the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import warnings

import torch

from onediff_ext.building.torch_lock import TORCH_LOCK
from onediff_ext.core.priority import lower_priority

_PR_SET_PDEATHSIG = 1


def fork() -> int:
    """Fork as `os.fork`, while no other thread is in the middle of an export, a load or an import.

    Raises:
        OSError: There is no memory for a copy.
    """
    with TORCH_LOCK, warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads: see the module's docstring.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def end(pid: int) -> None:
    """End a forked process at once.

    Args:
        pid: From `fork`.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def leave_the_parent(in_background: bool) -> None:
    """Prepare a forked process for work of its own. It dies with the thread that forked it.

    Args:
        in_background: At a low priority.
    """
    # The parent's garbage may hold CUDA graphs and events. Without the parent's CUDA context, their
    # destructors end the process.
    gc.freeze()
    die_with_parent(True)
    os.setsid()  # Ctrl-C goes to the parent only
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if in_background:
        lower_priority(in_background)
    torch.set_num_threads(1)  # the parent's threads do not exist here


def die_with_parent(dies: bool) -> None:
    """Choose whether the system kills this process when the thread that forked it ends.

    Args:
        dies: Whether it does.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if dies else 0)

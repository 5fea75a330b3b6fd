"""Processor cores, and the scheduling priority of background work.

Linux first shares the cores between sessions ("autogroups"); nice values count only within a
session. Background work runs in its own sessions, so whole sessions must give way: workers at
nice 10 in a session of nice 0 took half of the cores. Pictures slowed down far more than that,
because their threads wait for each other at every operation.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from onediff_ext.core.forks import WhileWanted

# Nice values of a session beside sessions at 0: about 1/30 of the time, and 1/4.
_WHILE_DRAWING, _BETWEEN_PICTURES = 15, 5
# Linux divides a process's weight by this with each nice value.
_WEIGHT_RATIO = 1.25
# Without autogroups, this nice value leaves a process a tenth of a busy core.
_IN_BACKGROUND, _WAITED_FOR = 9, 5
# How long a thread keeps the GIL while others wait for it; Python's default is 5 ms.
_SWITCH_S = 0.0002


def usable_cores() -> int:
    """Return the number of cores that this process may use, as limited by containers or taskset."""
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lower_priority(in_background: bool) -> None:
    """Lower the priority of this process and its children within their session.

    Args:
        in_background: Pictures are drawn at the same time.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_IN_BACKGROUND if in_background else _WAITED_FOR)


def give_memory_first() -> None:
    """Have the system end this process, and not the drawing one, when memory runs out (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def nice_for_share(share: float) -> int:
    """Return the nice value that leaves at least this share of a core beside a process at 0.

    Args:
        share: Above 0 and up to a half.
    """
    return max(0, math.floor(math.log((1 - share) / share, _WEIGHT_RATIO)))


class SessionPriorities:
    """Lowers the priority of worker sessions: a lot while a picture is drawn, a little otherwise.

    It has no effect without autogroups (another system, autogroups switched off, a control group
    with its own share). There nice values count among all sessions.
    """

    def __init__(self) -> None:
        self._told: dict[int, int] = {}

    def tell(self, pid: int, drawing: bool, share: float = 0.0) -> None:
        """Set the priority of the session that a process leads; cheap if nothing changed.

        Args:
            pid: The process.
            drawing: Whether a picture is being drawn.
            share: Share of a busy core that the session keeps while a picture is being drawn;
                0 for the least.
        """
        nice = _BETWEEN_PICTURES
        if drawing:
            nice = min(_WHILE_DRAWING, nice_for_share(share)) if share else _WHILE_DRAWING
        if self._told.get(pid) == nice:
            return
        with contextlib.suppress(OSError, AttributeError):
            if os.getsid(pid) == pid:  # before that, its session is ours, which must not give way
                Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")
                self._told[pid] = nice


def _switch_often() -> Callable[[], object]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(min(_SWITCH_S, usual_s))
    return partial(sys.setswitchinterval, usual_s)


_switching = WhileWanted(_switch_often)


def quick_switches() -> AbstractContextManager[None]:
    """Let this process's threads switch often, for Python work beside a drawing thread.

    A drawing thread releases the GIL at nearly every operation. With the default interval it gets
    the GIL back only after 5 ms each time.
    """
    return _switching.wanted()

"""Processors, and the priority of what happens beside the pictures.

Linux shares the processors between sessions first ("autogroups"), and nice values count within a
session only. What works beside the pictures has sessions of its own, so these have to give way: at
nice 10 in a session of nice 0 workers took half the processors, and pictures waited far longer
than that, because their threads wait for each other at every operation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

# Of a session, beside others at 0: about a thirtieth of the time, and a quarter.
_WHILE_DRAWING, _BETWEEN_PICTURES = 15, 5
# How long a thread keeps Python to itself while others want it; 5 ms unless told otherwise.
_SWITCH_S = 0.0002


def usable_cores() -> int:
    """Processors that this process may run on: a container or ``taskset`` may leave it few."""
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def step_back(in_background: bool) -> None:
    """Let this process, and all that it starts, give way to others of its session.

    Args:
        in_background: Somebody draws meanwhile.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(10 if in_background else 5)


class GivingWay:
    """Sessions that give way to others: much while somebody draws, a little between pictures.

    Makes no difference where sessions share nothing (another system, autogroups switched off, a
    control group with a share of its own): nice values count among all sessions there.
    """

    def __init__(self) -> None:
        self._told: dict[int, bool] = {}

    def tell(self, pid: int, drawing: bool) -> None:
        """Tell the session that a process leads whether somebody draws now; cheap if it knows."""
        if self._told.get(pid) == drawing:
            return
        with contextlib.suppress(OSError, AttributeError):
            if os.getsid(pid) == pid:  # until then it is one of ours, which must not give way
                nice = _WHILE_DRAWING if drawing else _BETWEEN_PICTURES
                Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")
                self._told[pid] = drawing


class _Switching:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._usual_s = 0.0

    def change(self, by: int) -> None:
        with self._lock:
            if not self._wanted:
                self._usual_s = sys.getswitchinterval()
            self._wanted += by
            sys.setswitchinterval(min(_SWITCH_S, self._usual_s) if self._wanted else self._usual_s)


_switching = _Switching()


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Have this process's threads take turns often, for work in Python beside one that draws.

    A thread that draws gives Python up at nearly each operation, and gets it back when the other
    thread's time is over: 5 ms each.
    """
    _switching.change(1)
    try:
        yield
    finally:
        _switching.change(-1)

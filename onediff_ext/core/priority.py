"""The priority of what happens beside the pictures.

Linux shares the processors between sessions first ("autogroups"), and nice values count within a
session only. What works beside the pictures has sessions of its own, so these have to give way: at
nice 10 in a session of nice 0 workers took half the processors, and pictures waited far longer
than that, because their threads wait for each other at every operation.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# Of a session, beside others at 0: about a thirtieth of the time, and a quarter.
_WHILE_DRAWING, _BETWEEN_PICTURES = 15, 5


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

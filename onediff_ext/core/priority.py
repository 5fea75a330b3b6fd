"""The priority of what happens beside the pictures."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def step_back(in_background: bool) -> None:
    """Let this process, and all that it starts, give way to others.

    Linux shares the processors between sessions first ("autogroups"), and nice values and classes
    count within a session only. Workers have sessions of their own, so these have to step back:
    at nice 10 in a session of nice 0 they took half the processors, and a picture of 4 s, whose
    threads wait for each other at every operation, took 70. At 19 they got nothing from somebody
    who draws on all cores.

    Args:
        in_background: Somebody draws meanwhile.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(10 if in_background else 5)
    with contextlib.suppress(OSError):
        group = Path("/proc/self/autogroup")
        group.write_text("15" if in_background else "5", encoding="ascii")

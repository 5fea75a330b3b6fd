"""Processes that this one has started."""

from __future__ import annotations

import subprocess
from typing import Any


def wait_or_kill(process: subprocess.Popen[Any], limit_s: float) -> None:
    """Wait until a process that was asked to end has ended; kill it when it takes longer.

    Args:
        process: The process.
        limit_s: How long it may take, in seconds.
    """
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

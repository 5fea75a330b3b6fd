"""Marks of tests that need what some systems lack; `without_posix.py` takes it away on Linux."""

from __future__ import annotations

import os
import signal

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, so a POSIX system")
needs_signals = pytest.mark.skipif(
    not hasattr(signal, "SIGKILL"), reason="ends processes by signals, so needs a POSIX system"
)
needs_groups = pytest.mark.skipif(
    not hasattr(os, "killpg"), reason="needs groups of processes, so a POSIX system"
)

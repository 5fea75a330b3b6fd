"""Marks of tests that need what some systems lack; `without_posix.py` takes it away on Linux."""

from __future__ import annotations

import os
import signal

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, so a POSIX system")
needs_sessions = pytest.mark.skipif(
    not hasattr(os, "getsid"), reason="processes have no sessions, so needs a POSIX system"
)
needs_signals = pytest.mark.skipif(
    not hasattr(signal, "SIGKILL"), reason="ends processes by signals, so needs a POSIX system"
)


def skip_without_rays_names() -> None:
    """Skip a test whose process starts Ray: on a POSIX system Ray itself uses POSIX's names."""
    if os.name == "posix" and not hasattr(signal, "pthread_sigmask"):
        pytest.skip("Ray of a POSIX system needs pthread_sigmask, which was taken away")

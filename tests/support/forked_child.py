"""A forked copy of this process that does some work within a time."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LIMIT_S = 20


def passes_in_child(work: Callable[[], object], limit_s: int = LIMIT_S) -> bool:
    """Do some work in a forked process, which ends without the parent's exit functions.

    Args:
        work: Raises when it fails.
        limit_s: A process that hangs is ended after so long.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(limit_s)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


@contextmanager
def in_another_thread(held: Any) -> Iterator[None]:
    """Have another thread within a context during this ``with`` block."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with held:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert entered.wait(LIMIT_S)
    try:
        yield
    finally:
        leave.set()
        thread.join()

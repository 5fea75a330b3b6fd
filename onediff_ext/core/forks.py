"""Locks and waits that a forked process is free of.

`os.fork`, and so multiprocessing's start method "fork", copies a process with only the thread that
forks. A lock that another thread held at that moment stays locked in the copy for ever, and what
another thread was about to finish never comes. Locks that background threads take are made here;
objects that wait for threads, or count what threads do, register with `forgets_threads`.

Locks that are held for a whole forward are no such locks. They protect what the drawing thread has
changed in a model and has not taken back, so a copy cannot draw with that model.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol


class OfThreads(Protocol):
    """An object whose state depends on threads."""

    def forget_other_threads(self) -> None:
        """Become as if all threads but the calling one had never been. All locks are free."""


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_objects: weakref.WeakSet[OfThreads] = weakref.WeakSet()


def fork_safe_lock() -> AbstractContextManager[bool]:
    """Return a re-entrant lock that is free in a forked process, unless the forking thread has it.

    It is re-entrant since only such a lock knows its thread.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def fork_safe_condition() -> threading.Condition:
    """Return a condition whose lock is as that of `fork_safe_lock`."""
    condition = threading.Condition()
    _locks.add(condition)
    return condition


def forgets_threads(owner: OfThreads) -> None:
    """Have an object forget other threads in each process that is forked from now on.

    Args:
        owner: Held weakly.
    """
    _objects.add(owner)


class ThreadCounts(Counter[int]):
    """How often each thread is within something, by `threading.get_ident`; empty if none is."""

    def enter(self) -> None:
        """Count the calling thread once more."""
        self[threading.get_ident()] += 1

    def leave(self) -> None:
        """Count the calling thread once less."""
        thread = threading.get_ident()
        self[thread] -= 1
        if not self[thread]:
            del self[thread]

    def forget_other_threads(self) -> None:
        """Keep the calling thread's count alone."""
        for thread in self.keys() - {threading.get_ident()}:
            del self[thread]


class WhileWanted:
    """A setting of the whole process that is another one while any thread wants it.

    Args:
        change: Called when the first thread begins to want it; returns what is called when the last
            one has ended. In a forked process only the forking thread counts.
    """

    def __init__(self, change: Callable[[], Callable[[], object]]) -> None:
        self._change = change
        self._lock = fork_safe_lock()
        self._threads = ThreadCounts()
        self._take_back: Callable[[], object] | None = None
        forgets_threads(self)

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Want it within the ``with`` block; blocks may be nested."""
        with self._lock:
            if self._take_back is None:
                self._take_back = self._change()
            self._threads.enter()
        try:
            yield
        finally:
            with self._lock:
                self._threads.leave()
                self._settle()

    def forget_other_threads(self) -> None:
        """Keep it for the calling thread alone."""
        self._threads.forget_other_threads()
        self._settle()

    def _settle(self) -> None:
        if not self._threads and self._take_back is not None:
            take_back, self._take_back = self._take_back, None
            take_back()


def _begin_in_child() -> None:
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()  # what Python's own modules call then
    for owner in list(_objects):
        owner.forget_other_threads()


if hasattr(os, "register_at_fork"):  # Windows forks no processes
    os.register_at_fork(after_in_child=_begin_in_child)

"""Named locks between processes, which the system releases when their holder dies.

Each lock is a file in one folder, locked by the filelock package. Lock files would pile up unless
they are removed. But removing a file that another process has just opened would let two processes
hold "the same" lock. So a further lock, the *guard*, is held for the microseconds in which a lock
file is opened, tried or removed.

The guard also orders publishing against deleting (see `atomic_write.py`). A thread must not take
it twice.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from onediff_ext.core.errors import StoreError
from onediff_ext.store.default_root import ROOT_VARIABLE
from onediff_ext.store.write_errors import mapped_write_errors

GUARD_NAME = "guard"
GUARD_TIMEOUT_S = 30.0
_GUARD_POLL_S = 0.002
_FIRST_POLL_S = 0.01
_LAST_POLL_S = 0.25


class StoreBusyError(StoreError):
    """Another process held a lock for longer than the timeout."""


class StoreLocks:
    """The named locks of one store.

    Args:
        folder: The folder of the lock files. It must exist before a lock is taken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Hold the guard, for moments only.

        Raises:
            StoreBusyError: It was not free within GUARD_TIMEOUT_S.
            StoreReadOnlyError: The folder cannot be written.
            StoreError: The disk does not support locks.
        """
        lock = self._new(GUARD_NAME)
        with mapped_write_errors(Path(lock.lock_file)):
            try:
                lock.acquire(timeout=GUARD_TIMEOUT_S, poll_interval=_GUARD_POLL_S)
            except Timeout as exc:
                raise StoreBusyError(
                    f"{lock.lock_file} has been locked for over {GUARD_TIMEOUT_S:g} s.",
                    "End the process that holds it, probably a stopped WebUI.",
                ) from exc
            except NotImplementedError as exc:
                raise StoreError(
                    f"The disk of {self.folder} does not support locks.",
                    f"Set {ROOT_VARIABLE} to a folder on a local disk.",
                ) from exc
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def hold(self, name: str, timeout_s: float) -> Iterator[None]:
        """Hold a named lock; its file is removed afterwards.

        Args:
            name: Of the lock; also the name of its file.
            timeout_s: How long to wait for another holder.

        Raises:
            StoreBusyError: Another holder kept it for longer than `timeout_s`.
            StoreReadOnlyError: The folder cannot be written.
        """
        lock = self._wait_for(name, timeout_s)
        try:
            yield
        finally:
            self._release(lock)

    def exclude(self) -> bool:
        """Whether locks work on this disk: a second attempt to take a held lock must fail."""
        name = f"probe-{os.getpid()}-{secrets.token_hex(4)}"
        with self.hold(name, timeout_s=1.0):
            return not self.if_free(name, lambda: None)

    def if_free(self, name: str, action: Callable[[], object]) -> bool:
        """Run `action` while holding a named lock, if it is free; remove its file.

        Args:
            name: Of the lock.
            action: Must be short, since it runs under the guard.

        Returns:
            Whether the lock was free.
        """
        with self.guard():
            lock = self._try(name)
            if lock is None:
                return False
            try:
                action()
            finally:
                lock.release()
                _remove(Path(lock.lock_file))
            return True

    def collect(self) -> int:
        """Remove the lock files of dead processes.

        Returns:
            The number of free locks.
        """
        names = [path.stem for path in self.folder.glob("*.lock") if path.stem != GUARD_NAME]
        return sum(self.if_free(name, lambda: None) for name in names)

    def _new(self, name: str) -> BaseFileLock:
        # A new lock object for each use: it excludes other threads too, and a forked child inherits
        # none. Not thread-local, so that any thread may close a generator.
        return FileLock(str(self.folder / f"{name}.lock"), mode=0o600, thread_local=False)

    def _try(self, name: str) -> BaseFileLock | None:
        lock = self._new(name)
        with mapped_write_errors(Path(lock.lock_file)):
            try:
                lock.acquire(blocking=False)
            except Timeout:
                return None
        return lock

    def _wait_for(self, name: str, timeout_s: float) -> BaseFileLock:
        deadline, poll_s = time.monotonic() + timeout_s, _FIRST_POLL_S
        while True:
            with self.guard():
                lock = self._try(name)
            if lock is not None:
                return lock
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StoreBusyError(
                    f"Another process has held the lock {name!r} for over {timeout_s:g} s.",
                    "Wait for the other WebUI or command to finish, or end it.",
                )
            time.sleep(min(poll_s, left_s))
            poll_s = min(poll_s * 1.5, _LAST_POLL_S)

    def _release(self, lock: BaseFileLock) -> None:
        try:
            with self.guard():
                # Windows cannot remove an open file, so the lock is released first. Under the guard
                # no other process can take it in between.
                lock.release()
                _remove(Path(lock.lock_file))
        finally:
            lock.release()  # again, in case the guard was not free


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # A leftover lock file is harmless; `collect` tries again.
        return

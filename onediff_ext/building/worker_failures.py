"""The policy for a worker process that fails, dies or is killed.

1. The worker's last words become an error (`worker_lost_error`). A signal from outside (a user, a
   supervisor, the kernel when memory is short) is no fault of the program, and neither is a lack of
   memory for the worker's own libraries.
2. The job is tried again in another process, up to `CompileOptions.build_attempts` times. Two
   faults that no signal explains blame the program (`FAULTS_TO_BLAME`); only then does the store
   remember the failure.
3. A lost worker may have needed all the memory: from then on jobs run one at a time.
4. If a further worker process has no room, the run goes on with the present ones. Any other fault
   of the machine (full disk, no compiler) ends the run; its kinds stay missing and are tried later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Sequence

from onediff_ext.building.build_jobs import Job
from onediff_ext.building.event_log import EventLog
from onediff_ext.building.worker.blame import MEMORY, blame_of
from onediff_ext.core.errors import (
    MachineError,
    NoMemoryError,
    OneDiffError,
    WorkerKilledError,
    WorkerLostError,
)

# Worker processes that must fail on a program before the program is to blame.
FAULTS_TO_BLAME = 2
# What Windows has in place of signals: exit codes of processes that were ended from outside.
_OUTSIDE_CODES = {
    0xC000013A: "Ctrl-C",
    0xC0000017: "the system, which has no memory",
    0xC000012D: "the system, which has no memory",
}
_ENDED = 1  # the Task Manager's and TerminateProcess's, but an exception's too
_CRASHED = 0x80000000  # larger codes are those of crashes
_ANOTHER = "another program"
_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", _ANOTHER, *_OUTSIDE_CODES.values()}


def last_words(code: int, log: Sequence[str], windows: bool = os.name == "nt") -> str:
    """Say how a worker process died.

    Args:
        code: Its exit code, or -9 for signal 9.
        log: The lines that it has printed.
        windows: Whether it ran on Windows.
    """
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    if windows:
        if code in _OUTSIDE_CODES:
            return f"killed by {_OUTSIDE_CODES[code]}"
        if code == _ENDED and not any(line.startswith("Traceback") for line in log):
            return f"killed by {_ANOTHER}"
        if code >= _CRASHED:
            return f"crashed with {code:#010x}"
    return log[-1] if log else f"exit code {code}"


def worker_lost_error(words: str) -> WorkerLostError:
    """Return the error for a dead worker.

    Args:
        words: As `last_words` returns them.

    Returns:
        A `WorkerKilledError` when a signal from outside, or a lack of memory, ended the worker.
    """
    was_killed = any(words == f"killed by {name}" for name in _OUTSIDE)
    error = WorkerKilledError if was_killed or blame_of(words) == MEMORY else WorkerLostError
    return error(f"The build worker died: {words}")


class WorkerFailures:
    """The failures of one build run, and what follows from them.

    Args:
        most_attempts: Worker processes that may fail on one job.
        most_workers: Workers at the same time, at most.
        event_log: Told about each retry.
    """

    def __init__(self, most_attempts: int, most_workers: int, event_log: EventLog) -> None:
        self._most_attempts, self._most_workers = most_attempts, most_workers
        self._event_log = event_log
        self._one_at_a_time = False

    def worker_limit(self, allowed: int) -> int:
        """Workers at the same time, at most.

        Args:
            allowed: The limit without failures.
        """
        return min(allowed, 1 if self._one_at_a_time else max(1, self._most_workers))

    def may_retry(self, job: Job, error: OneDiffError) -> bool:
        """Count a failure; return whether another worker process tries the job again."""
        job.failed_attempts += 1
        job.faults += not isinstance(error, WorkerKilledError)
        was_lost = isinstance(error, WorkerLostError)
        if job.failed_attempts >= self._most_attempts:
            return False
        if self.is_to_blame(job) and not was_lost:
            return False
        self._one_at_a_time = self._one_at_a_time or was_lost
        self._event_log.note("retried", job.kind.label, error.message, level=logging.WARNING)
        return True

    def is_to_blame(self, job: Job) -> bool:
        """Whether the job's program, or its stored graph, caused the failures."""
        return job.faults >= FAULTS_TO_BLAME

    def may_go_on(self, job: Job, error: MachineError, working: int) -> bool:
        """Handle a fault of the machine; return whether the run goes on.

        Args:
            job: The job that had no room. It goes on waiting.
            error: What failed.
            working: Jobs that are in a worker now. They have their memory.
        """
        if not (isinstance(error, NoMemoryError) and working):
            return False
        self._most_workers = working
        self._event_log.note("retried", job.kind.label, error.message)
        return True

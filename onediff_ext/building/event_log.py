"""The event log: what happened to the kinds of one session and why, also written to the log."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

from onediff_ext.core.forks import fork_safe_lock

logger = logging.getLogger(__name__)

_KEPT = 1000


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Args:
        at: Seconds since the epoch.
        what: ``"build"``, ``"built"``, ``"load check"``, ``"load checked"``, ``"loaded"``,
            ``"missing"``, ``"retried"``, ``"put off"``, ``"failed"``, ``"bad"``, ``"wrong"``,
            ``"cancelled"``, ``"tune"``, ``"tuned"`` or ``"not tuned"``.
        label: The kind's label, or the name of what else it happened to.
        reason: Why.
    """

    at: float
    what: str
    label: str
    reason: str

    def line(self) -> str:
        """One line for people."""
        return f"{self.what}: {self.label}{f' ({self.reason})' if self.reason else ''}"


class EventLog:
    """The last 1000 events of one session."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._lock = fork_safe_lock()

    def note(self, what: str, label: str, reason: str = "", *, level: int = logging.INFO) -> None:
        """Add an event, and write it to the log.

        Args:
            what, label, reason: As in `Event`.
            level: Of the log message.
        """
        event = Event(time.time(), what, label, reason)
        with self._lock:
            self._events.append(event)
        logger.log(level, "%s", event.line())

    @property
    def events(self) -> list[Event]:
        """A copy of the events, oldest first."""
        with self._lock:
            return list(self._events)

"""What happened to the kinds of this process and why, in plain words; the log says the same."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_KEPT = 1000


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Args:
        at: Seconds since the epoch.
        what: ``"build"``, ``"built"``, ``"loaded"``, ``"proved"``, ``"retried"``, ``"put off"``,
            ``"failed"``, ``"bad"``, ``"cancelled"``, ``"evicted"`` or ``"captured"``.
        label: Of the kind, or of what it happened to.
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
    """The last events of one session, oldest first."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def note(self, what: str, label: str, reason: str = "", *, level: int = logging.INFO) -> None:
        """Keep an event and log it."""
        event = Event(time.time(), what, label, reason)
        with self._lock:
            self._events.append(event)
        logger.log(level, "%s", event.line())

    @property
    def events(self) -> list[Event]:
        """A copy of what is kept."""
        with self._lock:
            return list(self._events)

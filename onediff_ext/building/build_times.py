"""How long the builds of one run took, and how fast the workers are beside the pictures."""

from __future__ import annotations

import time


class BuildTimes:
    """The times of one build run, which begins now.

    Attributes:
        own_s: Of each build so far, the worker's own seconds.
    """

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self.own_s: list[float] = []
        self._waits_s: list[float] = []

    @property
    def spent_s(self) -> float:
        """How long the run has gone on."""
        return time.monotonic() - self._began_at

    def add(self, own_s: float, started_at: float) -> None:
        """Note a build that has just ended.

        Args:
            own_s: The worker's own seconds.
            started_at: When it was begun, by `time.monotonic`.
        """
        self.own_s.append(own_s)
        self._waits_s.append(max(own_s, time.monotonic() - started_at))

    def pace(self, least: float) -> float:
        """Return the speed of workers, 1 for full speed; as seen, once builds have come in.

        Args:
            least: The speed that pictures leave to them at least.
        """
        if least == 1.0 or not self._waits_s:
            return least
        return min(1.0, max(least, sum(self.own_s) / sum(self._waits_s)))

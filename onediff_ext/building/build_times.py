"""How long the builds of one run took, and how fast the workers are beside the pictures."""

from __future__ import annotations

import time

_KEPT_WITHIN = 1.25  # a figure for the whole run is kept until it is wrong by so much


class BuildTimes:
    """The times of one build run, which begins now.

    Attributes:
        own_s: Of each build so far, the worker's own seconds.
    """

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self.own_s: list[float] = []
        self._waits_s: list[float] = []
        self._whole_s: float | None = None

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

    def whole_s(self, left_s: float | None) -> float | None:
        """Estimate how long the whole run takes, in a figure that seldom changes.

        Args:
            left_s: Estimate of what is left; None when unknown, 0 where nothing has to be built.

        Returns:
            Seconds from the run's begin; None while there was never a figure.
        """
        if left_s:
            now_s, kept_s = self.spent_s + left_s, self._whole_s
            if kept_s is None or not kept_s / _KEPT_WITHIN <= now_s <= kept_s * _KEPT_WITHIN:
                self._whole_s = now_s
        return self._whole_s

    def pace(self, least: float) -> float:
        """Return the speed of workers, 1 for full speed; as seen, once builds have come in.

        Args:
            least: The speed that pictures leave to them at least.
        """
        if least == 1.0 or not self._waits_s:
            return least
        return min(1.0, max(least, sum(self.own_s) / sum(self._waits_s)))

"""When the process that draws may do something else for a moment, and when graphs may change.

Python runs one thread at a time: a second that another thread computes in Python is a second
that a picture waits. So whoever has work beside the pictures asks here for a turn first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onediff_ext.core.priority import quick_switches

logger = logging.getLogger(__name__)

# Of the time that pictures take, the part that other work may cost them.
SHARE_WHILE_DRAWING = 0.04
# A plain pipeline does not say when its picture ends: it has, when no forward came for so long.
QUIET_S = 0.3
# Between two pictures that follow each other at once, this part of a picture's time is saved up
# for other work, which the next picture then waits for: never longer than this.
SHARE_BETWEEN_PICTURES = 0.2
GAP_TURN_S = 0.4
# Work that took longer than it said is not held against what comes after it for ever.
DEBT_S = 0.2
_POLL_S = 0.02


class ForegroundScheduler:
    """Knows whether a picture is being drawn.

    Pictures are announced by `begin_picture` and `end_picture`; a host that cannot tell has
    its forwards taken for pictures. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pictures = 0
        self._forwards = self._moment = 0
        self._exclusive = False
        self.epoch = 0  # counts pictures, or forwards where nobody tells of pictures
        self.pictures_begun = 0
        self._drawing_since: float | None = None
        self._drawn_s = 0.0
        self._spent_s = 0.0
        self._last_end = 0.0
        self._gap_left_s = 0.0
        self._gap_turn = False
        self._wanted: list[tuple[float, bool]] = []
        self._in_gap = 0
        self._told_pictures = False
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def is_drawing(self) -> bool:
        """Whether a picture is being drawn, or was a moment ago by a host that cannot tell."""
        with self._changed:
            return self._is_drawing()

    @contextmanager
    def picture(self) -> Iterator[None]:
        """`begin_picture` and `end_picture` around a ``with`` block."""
        self.begin_picture()
        try:
            yield
        finally:
            self.end_picture()

    @property
    def moment(self) -> int | None:
        """Equal for calls within one forward; None outside of one."""
        return self._moment if self._forwards else None

    def begin_picture(self) -> None:
        """A picture begins; what waited for this moment happens first. May be nested."""
        with self._changed:
            self._wait_for_exclusive()
            self._told_pictures = True
            if not self._pictures and not self._forwards:
                self.pictures_begun += 1
                self._let_others_go_first()
                self._catch_up()
                self._start_clock()
            self._pictures += 1

    def end_picture(self) -> None:
        """A picture has ended, whether or not it succeeded."""
        with self._changed:
            self._pictures = max(0, self._pictures - 1)
            if not self._pictures and not self._forwards:
                saved = SHARE_BETWEEN_PICTURES * self._stop_clock()
                self._gap_left_s = min(GAP_TURN_S, self._gap_left_s + saved)
                self._gap_turn = True
                self._catch_up()
            self._changed.notify_all()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """One forward of a model. Graphs do not change within it."""
        with self._changed:
            if not self._pictures and not self._forwards:
                self._wait_for_exclusive()
                self._catch_up()
                self._start_clock()
            self._forwards += 1
            self._moment += 1
        try:
            yield
        finally:
            with self._changed:
                self._forwards -= 1
                if not self._pictures and not self._forwards:
                    self._stop_clock()
                    self._catch_up()
                self._changed.notify_all()

    def between_pictures(self, action: Callable[[], None]) -> None:
        """Run `action` now if nothing is being drawn, else before the next picture."""
        with self._changed:
            if self._pictures or self._forwards:
                self._waiting.append(action)
            else:
                action()

    def let_picture_end(self, at_most_s: float, stop: threading.Event) -> None:
        """Wait for the end of the picture that is being drawn, if it comes soon."""
        until = time.monotonic() + at_most_s
        with self._changed:
            while (self._pictures or self._forwards) and not stop.is_set():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(min(_POLL_S, left_s))

    @contextmanager
    def turn(
        self, cost_s: float, *, alone: bool = False, stop: threading.Event | None = None
    ) -> Iterator[bool]:
        """Wait for a moment in which some work costs pictures next to nothing, and do it.

        Args:
            cost_s: How long the work probably takes.
            alone: It must not run beside a picture at all; one that begins meanwhile waits.
            stop: Gives up waiting when set.

        Yields:
            Whether the turn was had; False after `stop`.
        """
        with self._changed:
            self._wanted.append((cost_s, alone))
            while not self._may_take(cost_s, alone):
                if stop is not None and stop.is_set():
                    break
                self._changed.wait(_POLL_S)
            self._wanted.remove((cost_s, alone))
            granted = self._may_take(cost_s, alone)
            beside = bool(self._pictures or self._forwards)
            in_gap = granted and not beside and self._is_drawing()
            self._in_gap += in_gap
            if granted and alone:
                self._exclusive, self._gap_turn = True, False
        start = time.monotonic()
        try:
            with quick_switches():
                yield granted
        finally:
            with self._changed:
                if granted:
                    self._in_gap -= in_gap
                    took_s = time.monotonic() - start
                    if in_gap:
                        self._gap_left_s = max(-DEBT_S, self._gap_left_s - took_s)
                    elif beside or self._is_drawing():
                        most = SHARE_WHILE_DRAWING * self._clock() + DEBT_S
                        self._spent_s = min(most, self._spent_s + took_s)
                    if alone:
                        self._exclusive = False
                self._changed.notify_all()

    def _may_take(self, cost_s: float, alone: bool) -> bool:
        if self._exclusive:
            return False
        if not self._is_drawing():
            return True
        if self._pictures or self._forwards:
            return not alone and self._spent_s + cost_s <= SHARE_WHILE_DRAWING * self._clock()
        return self._fits_in_gap(cost_s, alone)

    def _fits_in_gap(self, cost_s: float, alone: bool) -> bool:
        # What must run alone has no other chance while pictures follow each other: one a gap.
        return cost_s <= (GAP_TURN_S if alone and self._gap_turn else self._gap_left_s)

    def _is_drawing(self) -> bool:
        if self._pictures or self._forwards:
            return True
        return time.monotonic() - self._last_end < QUIET_S

    def _let_others_go_first(self) -> None:
        """Wait for work that fits into what was saved up, before a picture begins."""
        until = time.monotonic() + GAP_TURN_S
        while self._in_gap or any(self._fits_in_gap(*wanted) for wanted in self._wanted):
            if not self._is_drawing() and not self._in_gap:
                break  # it had its chance
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(min(_POLL_S, left_s))

    def _wait_for_exclusive(self) -> None:
        while self._exclusive:
            self._changed.wait(_POLL_S)

    def _catch_up(self) -> None:
        while self._waiting:
            action = self._waiting.popleft()
            try:
                action()
            except Exception:  # the picture matters more; whoever waited sees nothing change
                logger.exception("What waited for the end of a picture failed")

    def _start_clock(self) -> None:
        self.epoch += 1
        self._drawing_since = time.monotonic()

    def _stop_clock(self) -> float:
        """Ends a picture; returns its seconds."""
        self._last_end = time.monotonic()
        seconds = 0.0
        if self._drawing_since is not None:
            seconds = self._last_end - self._drawing_since
            self._drawn_s += seconds
            self._drawing_since = None
        return seconds

    def _clock(self) -> float:
        """Seconds that pictures have taken so far."""
        running = 0.0 if self._drawing_since is None else time.monotonic() - self._drawing_since
        return self._drawn_s + running

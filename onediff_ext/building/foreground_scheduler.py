"""Lets pictures go first: grants turns to other work, and decides when graphs may change.

Python runs one thread at a time: a picture waits for every second that another thread computes in
Python. So all work beside the pictures (exports, loads) asks here for a turn first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from onediff_ext.building.picture_clock import ModelCall, PictureClock
from onediff_ext.core.forks import ThreadCounts, forgets_threads, fork_safe_condition
from onediff_ext.core.priority import quick_switches

logger = logging.getLogger(__name__)

# Share of the drawing time that other work may take.
SHARE_WHILE_DRAWING = 0.04
# Nobody says when a bare module has drawn its picture. It has after so long without a forward.
QUIET_S = 0.3
# Between two pictures in direct succession, other work may take this share of the earlier picture's
# time. The next picture waits for it, at most for `GAP_TURN_S`. Before a picture with new graphs,
# which compares them with eager, it gets nothing.
SHARE_BETWEEN_PICTURES = 0.15
GAP_TURN_S = 0.4
# Work that exceeds its estimate leaves at most this debt to later work.
DEBT_S = 0.5
_POLL_S = 0.02


class _Wanted(NamedTuple):
    """A turn that some work waits for; the fields are those of `ForegroundScheduler.turn`."""

    cost_s: float
    alone: bool
    share: float


class ForegroundScheduler:
    """Knows whether a picture is being drawn, and grants turns to other work.

    Hosts announce pictures with `begin_picture` and `end_picture`, in the thread that draws. Calls
    of a module outside of these are told apart by `PictureClock`. Any thread may call any method.

    Args:
        now: Returns monotonic seconds.

    Attributes:
        epoch: Changes with each picture.
        pictures_begun: Counts pictures, those drawn at the same time as one.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._changed = fork_safe_condition()
        self._announced = ThreadCounts()  # open pictures of each thread
        self._forwards = ThreadCounts()  # that run
        self._moment = 0
        self._calls = PictureClock()
        self._has_unannounced = False  # a picture that is open until the next one, or silence
        self._exclusive = False
        self.epoch = 0
        self.pictures_begun = 0
        self._drawing_since: float | None = None
        self._drawn_s = 0.0
        self._spent_s = 0.0
        self._last_end = -QUIET_S
        self._gap_left_s = 0.0
        self._gap_turn = False
        self._threads = set[int]()  # that have drawn in the present picture
        self._is_halted = False  # the only one of them waits before a step, for one turn
        self._waiting_threads = set[int]()  # see `waiting`
        self._wanted: list[_Wanted] = []
        self._in_gap = 0
        self._waiting: deque[Callable[[], None]] = deque()
        forgets_threads(self)

    def forget_other_threads(self) -> None:
        """Other threads draw nothing in this forked process, and wait for nothing."""
        self._announced.forget_other_threads()
        self._forwards.forget_other_threads()
        self._threads &= {threading.get_ident()}
        self._waiting_threads &= {threading.get_ident()}
        self._exclusive = self._is_halted = False
        self._wanted, self._in_gap = [], 0
        if not self._is_busy() and not self._has_unannounced:
            self._drawing_since = None

    @property
    def is_drawing(self) -> bool:
        """Whether a picture is being drawn, or ended less than `QUIET_S` ago."""
        with self._changed:
            return self._is_drawing()

    @contextmanager
    def picture(self) -> Iterator[None]:
        """Draw one picture within the ``with`` block."""
        self.begin_picture()
        try:
            yield
        finally:
            self.end_picture()

    @property
    def moment(self) -> int | None:
        """Equal for all calls within one forward; None outside a forward."""
        return self._moment if self._forwards else None

    def begin_picture(self) -> None:
        """Begin a picture, after actions that waited for this moment. It may be nested."""
        with self._changed:
            self._wait_for_exclusive()
            thread = threading.get_ident()
            self._calls.forget()
            if not self._is_busy():
                self._begin()
            elif not self._announced[thread]:
                self.epoch += 1  # another thread draws too
            self._threads.add(thread)
            self._announced[thread] += 1

    def end_picture(self) -> None:
        """End a picture, successful or not."""
        with self._changed:
            thread = threading.get_ident()
            if thread not in self._announced:  # a host may end it in another thread
                thread = next(iter(self._announced), thread)
            self._announced[thread] -= 1
            if self._announced[thread] <= 0:
                del self._announced[thread]
            if not self._is_busy():
                self._gap_turn = True
                self._end(self._now())
            self._changed.notify_all()

    @contextmanager
    def forward(self, call: Callable[[], ModelCall] | None = None) -> Iterator[None]:
        """Run one forward of a model within the ``with`` block. Graphs do not change within it.

        Args:
            call: Asked whether an unannounced forward belongs to the picture before it; without it
                the forward is a picture of its own.
        """
        with self._changed:
            self._wait_for_exclusive()
            thread = threading.get_ident()
            if thread not in self._announced:
                self._enter_unannounced(None if call is None else call())
            self._threads.add(thread)
            self._forwards.enter()
            self._moment += 1
        try:
            if self._wanted:
                with self._changed:
                    self._halt()
            yield
        finally:
            with self._changed:
                self._forwards.leave()
                if not self._is_busy():
                    self._last_end = self._now()
                self._changed.notify_all()

    def call_alone(self) -> None:
        """Take a block's call outside of a forward for a picture, unless one was announced."""
        with self._changed:
            if threading.get_ident() not in self._announced:
                self.epoch += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other work within the ``with`` block: beside the thread's picture it may go on.

        Otherwise work that must run alone would wait for the end of that picture, and the picture
        for that work.
        """
        thread = threading.get_ident()
        with self._changed:
            self._waiting_threads.add(thread)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting_threads.discard(thread)
                self._wait_for_exclusive()

    def between_pictures(self, action: Callable[[], None]) -> None:
        """Run an action now if nothing is being drawn, else at the end of the picture."""
        with self._changed:
            if self._is_open():
                self._waiting.append(action)
            else:
                action()

    def let_picture_end(self, at_most_s: float, stop: threading.Event) -> None:
        """Wait until the present picture ends.

        Args:
            at_most_s: How long to wait, in seconds.
            stop: Ends the wait when set.
        """
        until = self._now() + at_most_s
        with self._changed:
            while self._is_open() and not stop.is_set():
                left_s = until - self._now()
                if left_s <= 0:
                    return
                self._changed.wait(min(_POLL_S, left_s))

    @contextmanager
    def turn(
        self,
        cost_s: float,
        *,
        alone: bool = False,
        stop: threading.Event | None = None,
        share: float = SHARE_WHILE_DRAWING,
    ) -> Iterator[bool]:
        """Wait for a moment in which some work hardly delays pictures; do it in the ``with`` block.

        Args:
            cost_s: Estimated time of the work, in seconds.
            alone: It must not run beside a picture. A picture that begins meanwhile waits. Once
                `share` allows it, a picture halts for it between two steps.
            stop: Ends the wait when set.
            share: Share of the drawing time that such work may take beside pictures.

        Yields:
            Whether the turn was granted; False after `stop`.
        """
        wanted = _Wanted(cost_s, alone, share)
        with self._changed:
            self._wanted.append(wanted)
            while not self._may_take(wanted):
                if stop is not None and stop.is_set():
                    break
                self._changed.wait(_POLL_S)
            self._wanted.remove(wanted)
            granted = self._may_take(wanted)
            beside = self._is_open()
            in_gap = granted and not beside and self._is_drawing()
            self._in_gap += in_gap
            if granted and alone:
                self._exclusive, self._gap_turn, self._is_halted = True, False, False
        start = self._now()
        try:
            with quick_switches():
                yield granted
        finally:
            with self._changed:
                if granted:
                    self._in_gap -= in_gap
                    took_s = self._now() - start
                    if in_gap:
                        self._gap_left_s = max(-DEBT_S, self._gap_left_s - took_s)
                    elif beside or self._is_drawing():
                        most = share * self._clock() + DEBT_S
                        self._spent_s = min(most, self._spent_s + took_s)
                    if alone:
                        self._exclusive = False
                self._changed.notify_all()

    def _may_take(self, wanted: _Wanted) -> bool:
        if self._exclusive:
            return False
        if not self._is_drawing() or self._all_wait():
            return True
        if self._is_open():
            return (self._is_halted or not wanted.alone) and self._is_earned(wanted)
        return self._fits_in_gap(wanted)

    def _all_wait(self) -> bool:
        """Whether every thread that draws in the present picture waits for other work."""
        return bool(self._waiting_threads) and self._threads <= self._waiting_threads

    def _is_earned(self, wanted: _Wanted) -> bool:
        return self._spent_s + wanted.cost_s <= wanted.share * self._clock()

    def _fits_in_gap(self, wanted: _Wanted) -> bool:
        # Work that must run alone gets one turn per gap: it has no other chance between pictures.
        has_turn = wanted.alone and self._gap_turn
        return wanted.cost_s <= (GAP_TURN_S if has_turn else self._gap_left_s)

    def _halt(self) -> None:
        """Before a step, wait for one turn of work that must run alone, if it has earned one.

        Only where a single thread draws, and nowhere but here: so nothing of the picture runs
        beside that work.
        """
        if self._forwards.total() > 1 or self._threads != {threading.get_ident()}:
            return
        until = self._now() + GAP_TURN_S  # for its begin
        self._is_halted = True
        try:
            while self._exclusive or self._is_wanted_in_halt(until):
                self._changed.notify_all()
                self._changed.wait(_POLL_S)
        finally:
            self._is_halted = False

    def _is_wanted_in_halt(self, until: float) -> bool:
        """Whether a halted picture has to wait for the begin of a turn."""
        if not self._is_halted or self._now() >= until:
            return False
        return any(wanted.alone and self._is_earned(wanted) for wanted in self._wanted)

    def _is_busy(self) -> bool:
        """Whether a forward runs, or an announced picture is open."""
        return bool(self._announced or self._forwards)

    def _is_open(self) -> bool:
        """Whether a picture is open. An unannounced one is closed here after a silence."""
        if self._has_unannounced and not self._is_busy() and self._is_quiet():
            self._close_unannounced()
        return self._is_busy() or self._has_unannounced

    def _is_drawing(self) -> bool:
        return self._is_open() or not self._is_quiet()

    def _is_quiet(self) -> bool:
        return self._now() - self._last_end >= QUIET_S

    def _enter_unannounced(self, call: ModelCall | None) -> None:
        """Begin a picture with this forward, unless it belongs to the one that is open."""
        busy = self._is_busy()
        if not busy and self._is_quiet():
            self._calls.forget()
        if self._calls.continues(call) and (busy or self._has_unannounced):
            return
        if busy:
            self.epoch += 1  # another thread draws too
        else:
            self._begin()
            self._has_unannounced = True

    def _close_unannounced(self) -> None:
        self._has_unannounced = False
        self._end(self._last_end)

    def _begin(self) -> None:
        if self._has_unannounced:
            self._close_unannounced()
        self.pictures_begun += 1
        self._threads.clear()
        self._let_others_go_first()
        self._catch_up()
        self.epoch += 1
        self._drawing_since = self._now()

    def _end(self, at: float) -> None:
        """End the picture, and save time for other work."""
        self._last_end = at
        seconds = 0.0
        if self._drawing_since is not None:
            seconds = max(0.0, at - self._drawing_since)
            self._drawn_s += seconds
            self._drawing_since = None
        saved_s = SHARE_BETWEEN_PICTURES * seconds
        self._gap_left_s = min(GAP_TURN_S, self._gap_left_s + saved_s)
        self._catch_up()

    def _let_others_go_first(self) -> None:
        """Before a picture begins, wait for work that fits into the saved time, and no longer."""
        alone = any(wanted.alone for wanted in self._wanted)
        until = self._now() + (GAP_TURN_S if alone else self._gap_left_s)
        while self._in_gap or any(map(self._fits_in_gap, self._wanted)):
            if not self._is_drawing() and not self._in_gap:
                break  # the gap is over
            left_s = until - self._now()
            if left_s <= 0:
                break
            self._changed.wait(min(_POLL_S, left_s))

    def _wait_for_exclusive(self) -> None:
        while self._exclusive:
            self._changed.wait(_POLL_S)

    def _catch_up(self) -> None:
        if self._waiting:  # the next picture has new graphs
            self._gap_left_s = min(0.0, self._gap_left_s)
        while self._waiting:
            action = self._waiting.popleft()
            try:
                action()
            except Exception:  # must not cost the picture
                logger.exception("An action that waited for the end of a picture failed")

    def _clock(self) -> float:
        """Seconds of all pictures so far."""
        if self._drawing_since is None:
            return self._drawn_s
        until = self._now() if self._is_busy() else self._last_end
        return self._drawn_s + max(0.0, until - self._drawing_since)

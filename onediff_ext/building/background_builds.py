"""The thread that builds graphs while pictures are drawn."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from onediff_ext.building.build_progress import ProgressListener
from onediff_ext.building.builder import Builder
from onediff_ext.building.detached_builder import DetachedBuilder
from onediff_ext.building.foreground_scheduler import QUIET_S
from onediff_ext.core.errors import BackendError, NoMemoryError
from onediff_ext.core.forks import forgets_threads, fork_safe_condition
from onediff_ext.engine.blocks.block_kind import BlockKind

logger = logging.getLogger(__name__)

_all_builds: weakref.WeakSet[BackgroundBuilds] = weakref.WeakSet()

# The picture that met the first missing kinds keeps its speed for so long.
_FIRST_PICTURE_S = 3.0


class BackgroundBuilds:
    """Builds missing kinds in a thread, which lives as long as there is work.

    Args:
        builder: Builds.
        missing: Returns the kinds to build now, the most useful first.

    Attributes:
        listener: Called after each kind, or None.
    """

    def __init__(self, builder: Builder, missing: Callable[[], Sequence[BlockKind]]) -> None:
        self._builder, self._missing = builder, missing
        self._outcomes = builder.context.outcomes
        self._changed = fork_safe_condition()
        self._thread: threading.Thread | None = None
        self._stop, self._has_detached = threading.Event(), threading.Event()
        self._detached: DetachedBuilder | None = None
        self._cancelled: set[BlockKind] = set()
        self._cancelled_in = 0  # `ForegroundScheduler.pictures_begun` at the last cancel
        self._paused = self._closed = False
        self.listener: ProgressListener | None = None
        _all_builds.add(self)
        forgets_threads(self)

    def forget_other_threads(self) -> None:
        """Nothing is being built in this forked process."""
        self._thread = self._detached = None
        self._stop, self._has_detached = threading.Event(), threading.Event()

    @property
    def is_building(self) -> bool:
        """Whether builds are running."""
        with self._changed:
            return self._thread is not None

    @property
    def is_paused(self) -> bool:
        """Whether the user has paused builds."""
        return self._paused

    def start(self) -> None:
        """Build what is missing. Does nothing while builds run, are paused or wait for a retry."""
        with self._changed:
            if self._thread is not None or self._paused or self._closed:
                return
            if time.monotonic() < self._outcomes.retry_at or not self._wanted():
                return
            self._stop, self._has_detached = threading.Event(), threading.Event()
            thread = threading.Thread(target=self._work, name="onediff-builds", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # no room for a thread must not cost the picture
                self._outcomes.postpone_all(NoMemoryError(f"Builds cannot begin ({exc})."))
                return
            self._thread = thread

    def restart(self) -> None:
        """Build what is missing, also after `cancel` and `close`, and before the time of a retry.

        Paused builds stay paused.
        """
        with self._changed:
            self._cancelled.clear()
            self._closed, self._outcomes.retry_at = False, 0.0
        self.start()

    def cancel(self, timeout_s: float = 5.0) -> None:
        """End all builds at once, and keep finished graphs.

        Kinds that are missing now are not built until a later picture needs them (`needed`) or
        `restart`; kinds that are met later are.

        Args:
            timeout_s: How long to wait for the end.
        """
        with self._changed:
            self._cancelled.update(self._missing())
            self._cancelled_in = self._builder.context.foreground.pictures_begun
            self._stop.set()
        self.wait(timeout_s)

    def needed(self, kinds: Callable[[], Iterable[BlockKind]], picture: int) -> None:
        """Let cancelled kinds be built again that a picture needs, if it began after the cancel.

        Args:
            kinds: Returns the kinds that the picture needs; asked only if some are cancelled.
            picture: The picture's number, as `ForegroundScheduler.pictures_begun`.
        """
        with self._changed:
            if self._cancelled and picture > self._cancelled_in:
                self._cancelled.difference_update(kinds())

    def pause(self, timeout_s: float = 5.0) -> None:
        """End all builds at once, keep finished graphs, and start no build until `end_pause`.

        Args:
            timeout_s: How long to wait for the end.
        """
        with self._changed:
            self._paused = True
            self._stop.set()
        self.wait(timeout_s)

    def end_pause(self) -> None:
        """Let builds start again."""
        self._paused = False

    def close(self, timeout_s: float = 5.0) -> None:
        """End all builds at once, and start none until `restart`.

        Args:
            timeout_s: How long to wait for the end.
        """
        with self._changed:
            self._closed = True
            self._stop.set()
        self.wait(timeout_s)

    def hand_over(self, timeout_s: float = 3.0) -> None:
        """As `close`, but what is missing is built and stored after the end of this process.

        Workers finish what they are building. A `DetachedBuilder` does the rest.

        Args:
            timeout_s: How long to wait for an answer of another process, which comes late where all
                cores are busy.
        """
        if self.is_building:
            self._has_detached.wait(timeout_s)
            run = self._builder.run
            begun = [] if run is None else run.hand_over()
            with self._changed:
                detached, self._detached = self._detached, None
            if detached is not None and detached.take_over([k.key for k in begun], timeout_s):
                logger.info("Missing graphs are built after the end of this process")
        self.close(timeout_s=1.0)

    def is_cancelled(self, kind: BlockKind) -> bool:
        """Whether a kind was missing at a `cancel`, and nothing has asked for it since."""
        return kind in self._cancelled

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being built.

        Args:
            timeout_s: How long; None waits for ever.

        Returns:
            False when builds are still running after `timeout_s`.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _wanted(self) -> list[BlockKind]:
        with self._changed:
            return [kind for kind in self._missing() if kind not in self._cancelled]

    def _work(self) -> None:
        try:
            self._builder.context.foreground.let_picture_end(_FIRST_PICTURE_S, self._stop)
            self._detach()
            while not self._stop.is_set():
                kinds = self._wanted()
                if not kinds:
                    break
                self._builder.build(
                    kinds,
                    self.listener,
                    stop=self._stop,
                    in_background=True,
                    more=self._wanted,
                )
                # Graphs of a bare module come into use after a silence.
                self._builder.context.foreground.let_picture_end(QUIET_S, self._stop)
                if self._outcomes.blocked_reason:
                    break
        except Exception as exc:  # a thread's errors would be lost; pictures go on eager
            logger.exception("Builds ended")
            self._outcomes.postpone_all(BackendError(f"Builds ended: {exc}"))
        finally:
            with self._changed:
                if self._detached is not None:
                    self._detached.dismiss()
                self._thread = self._detached = None
                self._changed.notify_all()

    def _detach(self) -> None:
        """Fork a process that builds what is missing if this one ends before."""
        try:
            detached = self._builder.detach(self._wanted(), self._stop)
        except (OSError, RuntimeError) as exc:  # no memory, or this process ends
            logger.debug("What is missing is not built after this process: %s", exc)
        else:
            with self._changed:
                self._detached = detached
        finally:
            self._has_detached.set()


@atexit.register
def _hand_over_all() -> None:
    """Let graphs be built after the end of the interpreter that are missing then."""
    for builds in list(_all_builds):
        builds.hand_over()

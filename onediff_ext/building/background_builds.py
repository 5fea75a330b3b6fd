"""The thread that builds beside the pictures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from onediff_ext.building.builder import Builder, ProgressListener
from onediff_ext.core.errors import BackendError, NoMemoryError
from onediff_ext.engine.blocks.block_kind import BlockKind

logger = logging.getLogger(__name__)

# The picture that met the first missing kinds has enough to do, unless it takes long.
_FIRST_PICTURE_S = 3.0


class BackgroundBuilds:
    """Builds what is missing while somebody draws; the thread lives as long as there is work.

    Args:
        builder: Does it.
        missing: The kinds to build now, the most useful first.
    """

    def __init__(self, builder: Builder, missing: Callable[[], Sequence[BlockKind]]) -> None:
        self._builder, self._missing = builder, missing
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._cancelled: set[BlockKind] = set()
        self._closed = False
        self.listener: ProgressListener | None = None

    @property
    def is_building(self) -> bool:
        """Whether the thread is at work."""
        with self._changed:
            return self._thread is not None

    def start(self) -> None:
        """Build what is missing, unless that goes on already, was cancelled or cannot work now."""
        with self._changed:
            if self._thread is not None or self._closed:
                return
            if time.monotonic() < self._builder.retry_at or not self._wanted():
                return
            self._stop = threading.Event()
            thread = threading.Thread(target=self._work, name="onediff-builds", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # no room for a thread must not cost the picture
                self._builder.hold(NoMemoryError(f"Builds cannot begin ({exc})."))
                return
            self._thread = thread

    def resume(self) -> None:
        """Build although it was cancelled, or could not work a moment ago."""
        with self._changed:
            self._cancelled.clear()
            self._closed, self._builder.retry_at = False, 0.0
        self.start()

    def cancel(self, timeout_s: float = 5.0) -> None:
        """End all builds at once. What was built stays; what is missing now is not built until
        `resume`, while kinds that are met later are."""
        with self._changed:
            self._cancelled.update(self._missing())
            self._stop.set()
        self.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """End all builds at once, and start none until `resume`."""
        with self._changed:
            self._closed = True
            self._stop.set()
        self.wait(timeout_s)

    def is_cancelled(self, kind: BlockKind) -> bool:
        """Whether a kind was missing at a `cancel`, and nobody has asked for it since."""
        return kind in self._cancelled

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being built; returns whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _wanted(self) -> list[BlockKind]:
        with self._changed:
            return [kind for kind in self._missing() if kind not in self._cancelled]

    def _work(self) -> None:
        try:
            self._builder.foreground.let_picture_end(_FIRST_PICTURE_S, self._stop)
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
                if self._builder.problem:
                    break
        except Exception as exc:  # a thread's errors would be lost; pictures go on eager
            logger.exception("Builds ended")
            self._builder.hold(BackendError(f"Builds ended: {exc}"))
        finally:
            with self._changed:
                self._thread = None
                self._changed.notify_all()

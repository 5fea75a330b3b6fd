"""When a session builds what is missing: after a forward, at a user's request, or not now."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from onediff_ext.building.background_builds import BackgroundBuilds
from onediff_ext.building.build_progress import ProgressListener
from onediff_ext.building.builder import Builder
from onediff_ext.building.idle_tuning import IdleTuning
from onediff_ext.core.words import counted
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.session.met_kinds import MetKinds
from onediff_ext.session.stored_graph_lookup import StoredGraphLookup

_ANY_EPOCH = sys.maxsize


def end_builds(background: BackgroundBuilds, tuning: IdleTuning) -> None:
    """End all builds of a session at once.

    Args:
        background, tuning: Of the session, which may be gone already.
    """
    tuning.close()
    background.close()


class BuildControl:
    """Starts and ends the builds of one session.

    Args:
        builder: Builds.
        kinds: The kinds of the session.
        lookup: Knows which stored graphs await their load check.

    Attributes:
        background: The builds beside the pictures.
        tuning: The builds while the machine is idle.
    """

    def __init__(self, builder: Builder, kinds: MetKinds, lookup: StoredGraphLookup) -> None:
        self._builder, self._kinds, self._lookup = builder, kinds, lookup
        self._context = builder.context
        # Weak, since the background outlives its session for a moment, to be closed.
        to_build = weakref.WeakMethod(self._to_build)
        self.background = BackgroundBuilds(
            builder, lambda: [] if (method := to_build()) is None else method()
        )
        background = self.background
        self.tuning = IdleTuning(
            self._context,
            kinds.current,
            is_building=lambda: background.is_building or builder.run is not None,
        )
        self._holders = 0

    @property
    def listener(self) -> ProgressListener | None:
        """Called after each kind that was built, or None."""
        return self.background.listener

    @listener.setter
    def listener(self, listener: ProgressListener | None) -> None:
        self.background.listener = listener

    def after_forward(self) -> None:
        """Build what a forward found missing, unless builds are held, paused or postponed."""
        if self._holders or self.background.is_paused:
            return
        if self._context.options.build == "wait":
            if time.monotonic() >= self._context.outcomes.retry_at:
                self._build_and_wait()
        else:
            self.background.start()

    def after_picture(self) -> None:
        """Build in the background what a picture found missing, and tune what is there."""
        if self._context.options.build != "wait":
            self.background.start()
        self.tuning.start()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Build nothing within the ``with`` block, and everything together after it."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
        self.after_forward()

    def build_missing(self) -> None:
        """Build what is missing and wait for it. What fails runs eager, with its reason."""
        self._end_waits()
        self._build_and_wait()

    def build_in_background(self) -> None:
        """Build what is missing beside the pictures, also after `cancel`.

        Paused builds stay paused.
        """
        self._end_waits()
        self.background.restart()

    def cancel(self) -> None:
        """End all builds within a moment. See `BackgroundBuilds.cancel`."""
        was_building = self.background.is_building
        self.background.cancel()
        if was_building:
            self._note("cancelled")

    def pause(self) -> None:
        """End all builds within a moment, and start none until `go_on`."""
        was_building = self.background.is_building
        self.background.pause()
        if was_building:
            self._note("paused")

    def go_on(self) -> None:
        """End a pause, and build what is missing, also what was cancelled."""
        self.background.end_pause()
        self.build_in_background()

    def _note(self, event: str) -> None:
        what = counted(len(self._kinds.missing()), "graph")
        self._context.event_log.note(event, what, "by the user")

    def retry_failed(self) -> int:
        """Try again what could not be built, here and in earlier processes.

        Returns:
            The number of failed kinds of this process.
        """
        self._context.build_records.retry()
        failed = [kind for kind in self._kinds.all() if kind.state is KindState.FAILED]
        self._context.graph_trust.forget_refusals()
        self._end_waits()
        for kind in failed:
            kind.miss("tried again")
        if failed and self._context.options.build == "background":
            self.background.restart()
        return len(failed)

    def _end_waits(self) -> None:
        """Build also what was to be retried later."""
        self._context.outcomes.retry_at = 0.0
        for kind in self._kinds.all():
            kind.met(_ANY_EPOCH)

    def _build_and_wait(self) -> None:
        with self._context.foreground.waiting():
            self.background.wait()
        missing = self._to_build()
        if missing:
            self._builder.build(missing, self.listener)

    def _to_build(self) -> list[BlockKind]:
        missing = self._kinds.missing()
        if self._context.may_build:
            return missing
        return [kind for kind in missing if self._lookup.awaits_load_check(kind)]

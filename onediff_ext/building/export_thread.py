"""Exports the kinds of one build run in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.export_result import ExportResult
from onediff_ext.building.exporting import export_all
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.core.errors import NoMemoryError, WorkerLostError
from onediff_ext.engine.blocks.block_kind import BlockKind

logger = logging.getLogger(__name__)


class ExportThread:
    """A thread that exports one batch of kinds after the other.

    Args:
        context: Knows when a picture is drawn.
        in_background: Exports disturb pictures as little as possible.
        report: Called in the thread with each result.
        halt: Ends the exports when set.
    """

    def __init__(
        self,
        context: BuildContext,
        in_background: bool,
        report: Callable[[ExportResult], None],
        halt: threading.Event,
    ) -> None:
        self._context, self._in_background = context, in_background
        self._report, self._halt = report, halt
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether a batch is being exported."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, kinds: Sequence[BlockKind]) -> None:
        """Export kinds, those whose graph saves most time first.

        Raises:
            NoMemoryError: There is no room for a thread.
        """
        by_weight = sorted(kinds, key=lambda kind: -kind.weight)
        thread = threading.Thread(
            target=self._export, args=(by_weight,), name="onediff-export", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as exc:
            raise NoMemoryError(f"Blocks cannot be exported ({exc}).") from exc
        self._thread = thread

    def join(self) -> None:
        """Wait for the end of the thread; it ends early after `halt`."""
        if self._thread is not None:
            self._thread.join()

    def _export(self, kinds: Sequence[BlockKind]) -> None:
        context = self._context
        foreground = context.foreground if self._in_background else ForegroundScheduler()
        try:
            for result in export_all(
                kinds,
                foreground,
                self._halt,
                share=context.share,
                children=context.export_children,
                in_background=self._in_background,
            ):
                self._report(result)
        except Exception as exc:  # this thread's errors would be lost otherwise
            logger.exception("Exports ended")
            lost = WorkerLostError(f"Exports ended: {exc}")
            for kind in kinds:
                self._report(ExportResult(kind, None, lost))

"""Starts build runs, one at a time in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.build_progress import ProgressListener
from onediff_ext.building.build_run import BuildRun
from onediff_ext.building.detached_builder import DetachedBuilder
from onediff_ext.building.exporting import FORK_PAUSE_S, can_fork
from onediff_ext.building.worker_counts import workers_after_exit
from onediff_ext.core.errors import BackendError, MachineError
from onediff_ext.core.forks import forgets_threads, fork_safe_lock
from onediff_ext.engine.blocks.block_kind import BlockKind

logger = logging.getLogger(__name__)


class Builder:
    """Builds kinds. Among the processes that share a store, exactly one builds each kind.

    Args:
        context: The store, the backend, and what is known of builds.

    Attributes:
        context: As given.
        run: The present build run, or None.
    """

    def __init__(self, context: BuildContext) -> None:
        self.context = context
        self.run: BuildRun | None = None
        self._running = fork_safe_lock()
        forgets_threads(self)

    def forget_other_threads(self) -> None:
        """The run of another thread is not one of this forked process."""
        self.run = None

    def build(
        self,
        kinds: Sequence[BlockKind],
        listen: ProgressListener | None = None,
        *,
        stop: threading.Event | None = None,
        in_background: bool = False,
        more: Callable[[], Sequence[BlockKind]] | None = None,
    ) -> None:
        """Build each kind, or load its graph if another process was faster.

        A kind that cannot be built is marked as failed, with its reason, and nothing is raised.
        When the machine is the cause, kinds stay missing and `BuildOutcomes.blocked_reason` says
        why.

        Args:
            kinds: The most useful first.
            listen: Called after each kind.
            stop: Ends everything at once when set; graphs in work are lost.
            in_background: Pictures are drawn meanwhile: workers get the lowest priority, and graphs
                change between pictures. Otherwise the caller waits, and graphs change at once.
            more: Asked for further kinds while the run goes on.
        """
        context = self.context
        context.outcomes.blocked_reason = ""
        with self._running:
            context.sweep()
            try:
                run = BuildRun(context, kinds, listen, stop or threading.Event(), in_background)
            except BackendError as exc:
                context.outcomes.postpone_all(exc, kinds)
                return
            with run:
                self.run = run
                try:
                    run.work(more or (lambda: ()))
                except (OSError, MemoryError, RuntimeError) as exc:  # no room for a thread, say
                    logger.exception("Builds ended")
                    context.outcomes.postpone_all(MachineError(f"Builds ended: {exc}"))
                finally:
                    self.run = None
                    context.graph_loader.use_ready()

    def detach(self, kinds: Sequence[BlockKind], stop: threading.Event) -> DetachedBuilder | None:
        """Fork a process that can build kinds after the end of this one.

        Args:
            kinds: The most useful first.
            stop: Ends the wait for a moment in which a fork hardly delays pictures.

        Returns:
            The process. None where nothing is to be built, where processes do not fork, where
            graphs are shared with other machines, or where the GPU has no room for workers.

        Raises:
            OSError: There is no memory for another process.
            RuntimeError: This process ends, or the GPU does not answer.
        """
        context = self.context
        may_detach = can_fork() and context.export_children != 0 and context.may_build
        if not (kinds and may_detach and context.shared is None):
            return None
        device = kinds[0].device
        workers = workers_after_exit(device)
        if not workers:
            return None
        share = context.share.of_turns(device)
        with context.foreground.turn(FORK_PAUSE_S, stop=stop, share=share) as granted:
            if not granted or stop.is_set():
                return None
            return DetachedBuilder(context, kinds, workers)

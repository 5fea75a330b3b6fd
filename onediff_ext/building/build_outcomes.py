"""What follows from a build: its graph is stored, its kind fails or is retried later, or all builds
pause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from onediff_ext import __version__
from onediff_ext.building.event_log import EventLog
from onediff_ext.building.graph_trust import GraphTrust
from onediff_ext.building.new_graphs import store_new_graph
from onediff_ext.core.errors import (
    BackendError,
    BlockGoneError,
    ExportError,
    OneDiffError,
    StoreError,
)
from onediff_ext.core.words import day_of
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import BuildHistory, BuildRecords, GraphLibrary, StoredGraph

logger = logging.getLogger(__name__)

# How long builds pause after a full disk or a missing compiler.
RETRY_AFTER_S = 60.0


class BuildOutcomes:
    """Records how builds end, in this process and in the store.

    Args:
        library: Where new graphs are stored.
        backend_name: Noted with each graph.
        build_records: What later processes must know.
        history: Build times of this machine.
        graph_trust: Told about new graphs.
        event_log: Told about failures.

    Attributes:
        warnings: Why graphs are not stored, each reason once.
        blocked_reason: Why nothing can be built now (full disk, no compiler), or ``""``.
        retry_at: When builds may be tried again; monotonic, in seconds.
        on_stored: Called with each new graph in the store.
    """

    def __init__(
        self,
        library: GraphLibrary,
        backend_name: str,
        build_records: BuildRecords,
        history: BuildHistory,
        graph_trust: GraphTrust,
        event_log: EventLog,
    ) -> None:
        self._library, self._backend_name = library, backend_name
        self._build_records, self._history = build_records, history
        self._graph_trust, self._event_log = graph_trust, event_log
        self.warnings: list[str] = []
        self.blocked_reason, self.retry_at = "", 0.0
        self.on_stored: Callable[[StoredGraph], object] = lambda _: None

    def known_failure(self, kind: BlockKind) -> str | None:
        """Why an earlier process failed to build a kind; None when it may be tried."""
        failure = self._build_records.failure(kind.key.digest, __version__)
        if failure is None:
            return None
        return f"given up on {day_of(failure.at)}: {failure.reason}"

    def store_built_graph(self, kind: BlockKind, payload: bytes, build_s: float) -> None:
        """Store a new graph, its load check and its build time.

        A store that cannot be written is only a warning: the graph serves this process.

        Args:
            kind: The kind that the graph is for.
            payload: The graph's bytes. The worker that built them has tried them out.
            build_s: Seconds in the worker; 0 is left out of the history.
        """
        self.store_graph(kind, payload, build_s)
        if build_s:
            machine = machine_digest(kind.device)
            self._history.record_build(machine, self._backend_name, kind.label, build_s)

    def store_graph(self, kind: BlockKind, payload: bytes, build_s: float) -> bool:
        """As `store_built_graph`, for a graph whose build time says nothing of the next one's.

        Returns:
            Whether it is in the store.
        """
        try:
            stored = store_new_graph(
                self._library,
                kind.key,
                payload,
                label=kind.label,
                backend=self._backend_name,
                machine=machine_digest(kind.device),
                build_s=build_s,
            )
        except StoreError as exc:
            self.warn(exc)
            return False
        self._graph_trust.forget(kind)
        self.on_stored(stored)
        return True

    def fail_kind(
        self, kind: BlockKind, exc: OneDiffError, *, attempts: int, lasting: bool
    ) -> None:
        """Run a kind eager from now on.

        Args:
            kind: The kind.
            exc: Why it cannot be built.
            attempts: How often it was tried.
            lasting: In later processes too, until a user retries or the version changes. Only a
                failure that two worker processes have seen may last: this process may be patched.
        """
        kind.fail(f"could not be built: {exc.message}")
        self._event_log.note("failed", kind.label, kind.reason, level=logging.WARNING)
        if lasting:
            self._build_records.record_failure(
                kind.key.digest, kind.label, exc.message, attempts=attempts, version=__version__
            )

    def fail_in_this_process(self, kind: BlockKind) -> None:
        """Run a kind eager in this process: its graph differed here and passed its recheck."""
        kind.fail(f"{kind.reason}, but is right in a process of its own: something changes it here")
        self._event_log.note("failed", kind.label, kind.reason, level=logging.WARNING)

    def retry_later(
        self, kind: BlockKind, exc: OneDiffError, *, most_attempts: int, epoch: int
    ) -> None:
        """Try a kind again when a later picture needs it, since something else may be the cause.

        Args:
            kind: The kind.
            exc: What failed. A block that itself cannot be exported fails after some attempts.
            most_attempts: How many.
            epoch: The present one, as in `KindRegistry.epoch`.
        """
        is_its_own = isinstance(exc, ExportError) and not isinstance(exc, BlockGoneError)
        if is_its_own and kind.tries + 1 >= most_attempts:
            self.fail_kind(kind, exc, attempts=kind.tries + 1, lasting=False)
            return
        kind.retry_later(f"could not be built: {exc.message}", epoch)
        self._event_log.note("put off", kind.label, exc.message)

    def postpone_all(self, exc: BackendError, kinds: Sequence[BlockKind] = ()) -> None:
        """Pause all builds for `RETRY_AFTER_S`, since nothing can be built here now.

        Args:
            exc: Why.
            kinds: The kinds that were to be built. They stay missing, with this reason.
        """
        self.blocked_reason, self.retry_at = str(exc), time.monotonic() + RETRY_AFTER_S
        self._event_log.note("failed", "all builds", str(exc), level=logging.WARNING)
        for kind in kinds:
            if kind.state is KindState.MISSING:
                kind.reason = f"could not be built: {exc.message}"

    def warn(self, exc: StoreError) -> None:
        """Say once why graphs are not stored."""
        text = f"Graphs are not kept: {exc}"
        if text not in self.warnings:
            self.warnings.append(text)
            logger.warning("%s", text)

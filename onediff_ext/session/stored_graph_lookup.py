"""Looks up the stored graph of a kind that is met for the first time."""

from __future__ import annotations

import logging

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.read_ahead import ReadAhead
from onediff_ext.core.errors import BackendError
from onediff_ext.engine.blocks.block_kind import BlockKind


class StoredGraphLookup:
    """Loads stored graphs whose load check has passed on this machine.

    Args:
        context: The stored graphs, and what is known of them.
        read_ahead: Graphs that are loaded already.
    """

    def __init__(self, context: BuildContext, read_ahead: ReadAhead) -> None:
        self._context, self._read_ahead = context, read_ahead
        self._awaiting_load_check: set[str] = set()

    def awaits_load_check(self, kind: BlockKind) -> bool:
        """Whether a kind's stored graph was found without a load check on this machine.

        Args:
            kind: A kind that `look_up` has looked for.
        """
        return kind.key.digest in self._awaiting_load_check

    def look_up(self, kind: BlockKind) -> None:
        """Load a kind's stored graph; else leave the kind missing, or failed, with the reason.

        Args:
            kind: A kind without a graph.
        """
        context, event_log = self._context, self._context.event_log
        eager_reason = context.backend.unavailable_reason(kind.device)
        if eager_reason is not None:
            kind.fail(eager_reason)
            return
        if self._read_ahead.defer(kind):
            return
        graph = self._read_ahead.take(kind.key.digest, kind.device)
        if graph is not None:
            kind.accept(graph, "loaded")
            event_log.note("loaded", kind.label, "read ahead")
            return
        stored = context.graph_trust.usable_graph(kind)
        if stored is None or stored.payload is None:
            self._note_miss(kind)
            return
        if not context.graph_trust.is_load_safe(stored, kind):
            self._awaiting_load_check.add(kind.key.digest)
            kind.miss("its stored graph was never loaded on this machine; a load check comes first")
            event_log.note("load check", kind.label, kind.reason)
            return
        try:
            kind.accept(context.load(stored.payload, kind.device), "loaded")
            event_log.note("loaded", kind.label, "stored")
        except BackendError as exc:
            problem = f"cannot be loaded: {exc.message}"
            context.graph_trust.refuse(kind, stored.header.payload_sha256, problem)
            kind.miss(f"its stored graph {problem}")

    def _note_miss(self, kind: BlockKind) -> None:
        context = self._context
        failure = context.outcomes.known_failure(kind)
        if failure is not None:
            kind.fail(failure)
            context.event_log.note("failed", kind.label, failure, level=logging.WARNING)
        elif not context.may_build:
            # Nothing else explains it: a build run would, on another thread.
            kind.reason = context.graph_trust.missing_reason(kind)
            context.event_log.note("missing", kind.label, kind.reason)

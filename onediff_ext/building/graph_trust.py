"""Decides which stored graphs may be loaded: by their load check on this machine, and by what went
wrong in this process.

A graph that failed in this process is not blamed for it: another extension may have patched what
eager runs. Only a worker process, which runs no extensions, can find a stored graph bad.
"""

from __future__ import annotations

import logging

from onediff_ext.building.event_log import EventLog
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import BuildRecords, GraphLibrary, StoredGraph


class GraphTrust:
    """Decides for each stored graph whether this process loads it.

    Args:
        library: The stored graphs.
        build_records: The load checks.
        event_log: Where findings are logged.
    """

    def __init__(
        self, library: GraphLibrary, build_records: BuildRecords, event_log: EventLog
    ) -> None:
        self._library, self._build_records, self._event_log = library, build_records, event_log
        self._refused: dict[str, str] = {}  # digest of the kind's key → SHA-256 of the graph
        self._differed: dict[str, str] = {}

    def usable_graph(self, kind: BlockKind) -> StoredGraph | None:
        """Return the stored graph of a kind with its payload.

        Returns:
            None when there is none, when its load check failed on this machine, or when this
            process refused it.
        """
        stored = self._library.get(kind.key)
        if stored is None or stored.payload is None or self.is_load_safe(stored, kind) is False:
            return None
        if self._refused.get(kind.key.digest) == stored.header.payload_sha256:
            return None
        return stored

    def is_load_safe(self, stored: StoredGraph, kind: BlockKind) -> bool | None:
        """Whether a stored graph passed its load check here; None when there was no load check."""
        return self.is_load_safe_on(stored, machine_digest(kind.device))

    def is_load_safe_on(self, stored: StoredGraph, machine: str) -> bool | None:
        """The same as `is_load_safe`, for the machine with this `machine_digest`."""
        load_check = self._build_records.load_check(
            stored.digest, machine, stored.header.payload_sha256
        )
        return None if load_check is None else not load_check.problem

    def missing_reason(self, kind: BlockKind) -> str:
        """Say why a kind has no graph that may be used here."""
        machine = machine_digest(kind.device)
        load_check = self._build_records.read(kind.key.digest).load_checks.get(machine)
        reason = self._library.explain(kind.key, kind.label)
        if reason != "stored":
            return reason
        if load_check is not None and load_check.problem:
            return f"the stored one is bad on this machine: {load_check.problem}"
        return "the stored one was never loaded on this machine"

    def record_passed(self, kind: BlockKind, stored: StoredGraph) -> None:
        """Remember that a worker of this machine has loaded a graph, with eager's results."""
        self._build_records.record_load_check(
            stored.digest,
            kind.label,
            machine=machine_digest(kind.device),
            payload_sha256=stored.header.payload_sha256,
        )

    def record_bad(self, kind: BlockKind, payload_sha256: str, problem: str) -> None:
        """Never load these bytes on this machine again, in any process."""
        self._log_bad(kind, problem)
        self._build_records.record_load_check(
            kind.key.digest,
            kind.label,
            machine=machine_digest(kind.device),
            payload_sha256=payload_sha256,
            problem=problem,
        )

    def refuse(self, kind: BlockKind, payload_sha256: str, problem: str) -> None:
        """Do not load these bytes in this process again. Nothing is stored: this process may be
        the cause."""
        self._log_bad(kind, problem)
        self._refused[kind.key.digest] = payload_sha256

    def recheck(self, kind: BlockKind, reason: str) -> bool:
        """Have a stored graph checked in a worker process before it is used again, since it
        differed from eager in this process.

        Args:
            kind: Becomes missing when there is something to check.
            reason: What was seen.

        Returns:
            False when there is no stored graph, or it was rechecked before.
        """
        stored = self.usable_graph(kind)
        if stored is None or self.differed_here(stored):
            return False
        self._differed[kind.key.digest] = stored.header.payload_sha256
        kind.miss(f"its stored graph {reason}")
        return True

    def differed_here(self, stored: StoredGraph) -> bool:
        """Whether these bytes differed from eager in this process."""
        return self._differed.get(stored.digest) == stored.header.payload_sha256

    def forget(self, kind: BlockKind) -> None:
        """Forget what went wrong here with a kind's earlier graph, after a new one was stored."""
        self._refused.pop(kind.key.digest, None)
        self._differed.pop(kind.key.digest, None)

    def forget_refusals(self) -> None:
        """Forget what was refused, or differed from eager, in this process."""
        self._refused.clear()
        self._differed.clear()

    def _log_bad(self, kind: BlockKind, problem: str) -> None:
        self._event_log.note(
            "bad", kind.label, f"the stored graph {problem}", level=logging.WARNING
        )

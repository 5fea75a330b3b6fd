"""Shares graphs with other machines: fetches what is missing, publishes what was built, and takes
leases so that one machine builds each kind.

An exchange that is away costs nothing but the sharing: builds go on without it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from onediff_ext.core.errors import GraphCorruptError, StoreError
from onediff_ext.core.url_secrets import without_secrets
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import BuildRecords, GraphExchange, GraphLibrary, StoreBusyError, StoredGraph
from onediff_ext.store.graph_exchange import LEASE_S
from onediff_ext.store.graph_file import encode_head

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_LOOK_AGAIN_S = 2.0  # between two listings, and two tries for a lease


class SharedGraphs:
    """One process's share in an exchange.

    Args:
        exchange: What the machines share.
        holder: The name of this process for leases, unlike all others.
        library: The graphs of this machine.
        build_records: Its load checks.
        entries: The entries of a key that depend on machine and backend (`Session.key_entries`).
        device: The device that graphs are for.
    """

    def __init__(
        self,
        exchange: GraphExchange,
        holder: str,
        library: GraphLibrary,
        build_records: BuildRecords,
        entries: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self._exchange, self._holder = exchange, holder
        self._library, self._build_records, self._entries = library, build_records, entries
        # Graphs that passed their load check go to machines with the same digest only, where
        # the load check holds too.
        self._tag = self._machine = machine_digest(device)
        self._listed: set[str] = set()
        self._listed_at = -_LOOK_AGAIN_S
        self._refused_at: dict[str, float] = {}
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        threading.Thread(target=self._keep_leases, name="onediff-leases", daemon=True).start()

    def close(self) -> None:
        """Give all leases back."""
        self._stop.set()
        for digest in list(self._held):
            _quietly(partial(self._release, digest))

    def pull(self) -> list[str]:
        """Fetch all graphs of this machine's kind that the store lacks; return their digests."""
        with self._lock:
            mine = {graph.digest for graph in self._library.entries()}
            return [digest for digest in sorted(self._digests() - mine) if self._fetch(digest)]

    def push(self) -> int:
        """Publish the graphs of the store that passed their load check; return their number."""
        pushed = 0
        for graph in self._library.entries():
            entries = graph.key.entries
            if all(entries.get(name) == value for name, value in self._entries.items()):
                check = self._build_records.load_check(
                    graph.digest, self._machine, graph.header.payload_sha256
                )
                if check is not None and not check.problem and graph.digest not in self._digests():
                    loaded = self._library.find(graph.digest)
                    pushed += loaded is not None and self.publish(loaded)
        return pushed

    def publish(self, graph: StoredGraph) -> bool:
        """Give a graph that passed its trial here to the others; return whether it was new."""
        if graph.payload is None:
            return False
        graph_file = encode_head(graph.header)[0] + graph.payload
        done = _quietly(lambda: self._exchange.publish(self._tag, graph.digest, graph_file))
        self._listed.add(graph.digest)
        return bool(done)

    @contextmanager
    def claim(self, digest: str) -> Iterator[None]:
        """Fetch a kind's graph, or be the only machine that builds it.

        Args:
            digest: Of the kind's key; this machine's store has no graph of it.

        Raises:
            StoreBusyError: Another machine builds it. Ask again later.
        """
        with self._lock:
            is_here = self._fetch(digest)
        if is_here:
            yield
            return
        now_s = time.monotonic()
        if now_s - self._refused_at.get(digest, -_LOOK_AGAIN_S) < _LOOK_AGAIN_S:
            raise StoreBusyError("Another machine builds this graph.", "")
        leased = _quietly(lambda: self._exchange.lease(self._tag, digest, self._holder))
        if leased is False:
            self._refused_at[digest] = now_s + random.uniform(0, _LOOK_AGAIN_S)
            raise StoreBusyError("Another machine builds this graph.", "")
        self._held.add(digest)
        try:
            # The machine before may have published between the look and the lease.
            with self._lock:
                self._listed_at = -_LOOK_AGAIN_S
                self._fetch(digest)
            yield
        finally:
            _quietly(lambda: self._release(digest))

    def _release(self, digest: str) -> None:
        self._held.discard(digest)
        self._exchange.release(self._tag, digest, self._holder)

    def _fetch(self, digest: str) -> bool:
        """Store one graph of the exchange; its load check holds on all machines of the tag.

        What this machine knows of the same bytes stays: it may have crashed with them.
        """
        if digest not in self._digests():
            return False
        graph_file = _quietly(lambda: self._exchange.fetch(self._tag, digest))
        if graph_file is None:
            return False
        try:
            graph = self._library.add_graph_file(digest, graph_file)
        except StoreError as exc:
            logger.warning("A shared graph cannot be used: %s", exc)
            if isinstance(exc, GraphCorruptError):
                # Nobody could publish a sound one, and all machines would build their own.
                _quietly(lambda: self._exchange.discard(self._tag, digest))
                self._listed.discard(digest)
            return False
        content = graph.header.payload_sha256
        if self._build_records.load_check(digest, self._machine, content) is None:
            self._build_records.record_load_check(
                digest, graph.label, machine=self._machine, payload_sha256=content
            )
        return True

    def _digests(self) -> set[str]:
        now_s = time.monotonic()
        if now_s - self._listed_at >= _LOOK_AGAIN_S:
            found = _quietly(lambda: self._exchange.digests(self._tag))
            self._listed_at = now_s
            if found is not None:
                self._listed = found
        return self._listed

    def _keep_leases(self) -> None:
        while not self._stop.wait(LEASE_S / 3):
            for digest in list(self._held):
                # A lease that was lost to another is not asked for again; the build ends by itself.
                kept = _quietly(partial(self._exchange.lease, self._tag, digest, self._holder))
                if kept is False:
                    self._held.discard(digest)


def _quietly(ask: Callable[[], AnswerT]) -> AnswerT | None:
    """Ask the exchange; None when it does not answer."""
    try:
        return ask()
    except Exception as exc:  # what file systems and networks raise is their own
        reason = f"{type(exc).__name__}: {without_secrets(str(exc))}"
        logger.warning("Graphs are not shared now (%s)", reason)
        return None

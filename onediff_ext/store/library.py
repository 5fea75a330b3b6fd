"""The graph library: one file per kind, safe for several processes."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from onediff_ext.core.errors import (
    GraphCorruptError,
    OptionError,
    StoreError,
    StoreFullError,
    UntrustedGraphError,
)
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.records import ORIGIN_BUILT, GraphHeader
from onediff_ext.store import eviction
from onediff_ext.store.atomic_write import STALE_PART_AGE_S, collect_stale_parts, publish
from onediff_ext.store.eviction import PruneReport
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.graph_archive import ImportReport, checked_graph, read_archive, write_archive
from onediff_ext.store.graph_file import UnknownSchemaError, encode_head
from onediff_ext.store.miss_explanation import explain_absence
from onediff_ext.store.stored_graph import StoredGraph, graph_path, list_graphs, open_graph
from onediff_ext.store.verification import StoreProblem, find_problems, is_sound, remove_if_unusable
from onediff_ext.store.write_errors import mapped_write_errors

_LOG = logging.getLogger(__name__)


class GraphLibrary:
    """The graphs on disk, for several processes and threads. The first write creates the folder.

    Args:
        root: The store's folder; it may be missing.
        limit_bytes: Size limit. After each `put`, the least recently used graphs are deleted until
            the rest fits.

    Attributes:
        folder: The paths and locks of the store.
        limit_bytes: As given.

    Raises:
        OptionError: The limit is not positive.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise OptionError(
                f"The store's limit is {limit_bytes} bytes.", "Choose a limit above zero."
            )
        self.folder = StoreFolder(root)
        self.limit_bytes = limit_bytes
        self._used_here: set[str] = set()
        self._miss_reasons: dict[str, str] = {}
        self._cleaned = self._swept = False

    def get(self, key: KindKey) -> StoredGraph | None:
        """Return the graph of a kind with its checked payload.

        Args:
            key: The key of the kind.

        Returns:
            None for a miss; `explain` has the reason. A damaged file is deleted if possible. A file
            of another version, or one that other users may have written, stays.
        """
        return self.find(key.digest)

    def find(self, digest: str) -> StoredGraph | None:
        """Return the same as `get`, by the digest of the key.

        Args:
            digest: 64 hexadecimal digits.

        Raises:
            OptionError: `digest` is not a digest.
        """
        path = graph_path(self.folder.graphs, digest)
        try:
            self.folder.secure()
            graph = open_graph(path, with_payload=True)
        except FileNotFoundError:
            return None  # an earlier reason stays valid
        except UntrustedGraphError as exc:
            self._note_miss(digest, f"not trusted ({exc.message.rstrip('.')}). {exc.hint}")
            return None
        except UnknownSchemaError as exc:
            self._note_miss(digest, exc.message)
            return None
        except GraphCorruptError as exc:
            removed = self._discard_if_corrupt(path)
            after = "it was removed" if removed else "it could not be removed"
            self._note_miss(digest, f"damaged ({exc.message}); {after}")
            return None
        except OSError as exc:
            self._note_miss(digest, f"unreadable ({exc.strerror or exc})")
            return None
        self._mark_used(graph)
        return graph

    def read_payload(self, graph: StoredGraph) -> bytes:
        """Return a graph's checked payload, read from disk if `graph` has none.

        Args:
            graph: From `get` or `entries`.

        Raises:
            StoreError: The file was deleted since, or cannot be read.
            GraphCorruptError: It is damaged.
            UntrustedGraphError: Other users own the file or the store, or may write there.
        """
        if graph.payload is not None:
            return graph.payload
        self.folder.secure()
        try:
            loaded = open_graph(graph.path, with_payload=True)
        except OSError as exc:
            raise StoreError(
                f"Graph {graph.label!r} cannot be read any more ({exc.strerror or exc}).",
                "It may have been pruned; it is built again by itself.",
            ) from exc
        self._mark_used(loaded)
        return loaded.payload or b""

    def put(
        self,
        key: KindKey,
        payload: bytes,
        *,
        label: str,
        backend: str,
        build_seconds: float,
        details: Mapping[str, object],
        origin: str = ORIGIN_BUILT,
    ) -> StoredGraph:
        """Store a graph in place of the kind's earlier one, then evict graphs over the limit.

        Args:
            key: The key of the kind.
            payload: The graph's bytes.
            label, backend, build_seconds, details, origin: As in `GraphHeader`.

        Returns:
            The stored graph. Its details are as JSON reads them back.

        Raises:
            StoreFullError: The graph is larger than the limit, or the disk is full.
            StoreReadOnlyError: The folder cannot be written.
            StoreError: The details are not JSON, or writing failed otherwise.
        """
        header = GraphHeader(
            key=key,
            label=label,
            backend=backend,
            payload_sha256=hashlib.sha256(payload).hexdigest(),
            payload_size_bytes=len(payload),
            created_at=time.time(),
            build_seconds=build_seconds,
            origin=origin,
            details=details,
        )
        return self._publish(header, payload)

    def explain(self, key: KindKey, label: str | None = None) -> str:
        """Explain why `get` finds no graph for a kind.

        Args:
            key: The key of the kind.
            label: The label that the graph would have. Graphs with this label count as nearest.

        Returns:
            A sentence without a full stop; ``"stored"`` when there is a graph.
        """
        path = graph_path(self.folder.graphs, key.digest)
        if reason := self._miss_reasons.get(key.digest):
            return f"the stored graph was {reason}"
        if os.path.exists(path):
            return "stored"
        return explain_absence(self.folder, key, label, self.entries)

    def entries(self) -> list[StoredGraph]:
        """Return this version's sound graphs without payloads, most recently used first."""
        found = list_graphs(self.folder.graphs)
        return sorted(found, key=lambda graph: (-graph.last_used_at, graph.digest))

    def verify(self, repair: bool = False) -> list[StoreProblem]:
        """Return the store's problems, from a check of all graphs' bytes and all records.

        Args:
            repair: Delete the damaged ones and what others may have written; write a damaged
                `schema.json` again; move graphs back that were stored elsewhere while it was
                damaged. Files of another version stay.

        Raises:
            StoreReadOnlyError: `repair` cannot delete or move.
        """
        return list(find_problems(self.folder, repair))

    def delete(self, digest: str) -> bool:
        """Delete one graph.

        Args:
            digest: Of the kind's key.

        Returns:
            Whether there was one.

        Raises:
            OptionError: `digest` is not a digest.
            StoreReadOnlyError: The folder cannot be written.
        """
        path = graph_path(self.folder.graphs, digest)
        if not os.path.lexists(path):
            return False
        self.folder.prepare()
        with self.folder.locks.guard(), mapped_write_errors(path):
            path.unlink(missing_ok=True)
        return True

    def prune(
        self,
        limit_bytes: int | None = None,
        older_than_s: float | None = None,
        other_versions: bool = False,
    ) -> PruneReport:
        """Delete the least recently used graphs, and the leftovers of dead processes.

        Args:
            limit_bytes: Size to shrink to; None is the library's own limit.
            older_than_s: Also delete graphs that were not used for so long.
            other_versions: Also delete all graphs of other versions.

        Returns:
            What was deleted; graphs that this process used only when no others were left.

        Raises:
            StoreBusyError: Another process kept pruning for too long.
            StoreReadOnlyError: The folder cannot be written.
        """
        return eviction.prune(
            self.folder,
            limit_bytes=self.limit_bytes if limit_bytes is None else limit_bytes,
            older_than_s=older_than_s,
            other_versions=other_versions,
            used_here=self._used_here,
        )

    def is_being_built(self, digest: str) -> bool:
        """Whether a living process holds a kind's build lock.

        Args:
            digest: Of the kind's key.
        """
        if not (self.folder.locks.folder / f"build-{digest}.lock").exists():
            return False
        try:
            return not self.folder.locks.if_free(f"build-{digest}", lambda: None)
        except StoreError:
            return False  # the store is read-only

    def sweep(self) -> int:
        """Return how many part and lock files of killed processes it deletes, once per library.

        Raises:
            StoreReadOnlyError: The folder cannot be written.
        """
        if self._swept or not self.folder.exists():
            return 0
        self.folder.prepare()
        locks = self.folder.locks
        # Where locks work, a part with a free lock has no writer, whatever its age.
        removed = collect_stale_parts(self.folder, 0.0 if locks.exclude() else STALE_PART_AGE_S)
        self._swept = True
        return removed + locks.collect()

    @contextmanager
    def build_lock(self, key: KindKey, timeout_s: float) -> Iterator[None]:
        """Be the only process that builds a kind. Call `get` again inside the ``with`` block.

        The system frees the lock when its holder dies. The lock of one key cannot be nested.

        Args:
            key: The key of the kind.
            timeout_s: How long to wait for another process.

        Raises:
            StoreBusyError: Another process was building for longer than `timeout_s`.
            StoreReadOnlyError: The folder cannot be written.
        """
        self.folder.prepare()
        with self.folder.locks.hold(f"build-{key.digest}", timeout_s):
            yield

    def export(self, archive_path: Path, digests: Iterable[str] | None = None) -> int:
        """Write graphs to an archive.

        Args:
            archive_path: The archive; an earlier file is replaced.
            digests: Which graphs; None exports all of them.

        Returns:
            The number of graphs.

        Raises:
            StoreError: One of them is missing or damaged.
            StoreFullError, StoreReadOnlyError: The archive cannot be written.
        """
        graphs = self.folder.graphs
        wanted = [g.digest for g in self.entries()] if digests is None else [*digests]
        paths = [graph_path(graphs, digest) for digest in dict.fromkeys(wanted)]
        return write_archive(archive_path, paths)

    def import_archive(self, path: Path, trust: bool = False) -> ImportReport:
        """Import the graphs of an archive that are not stored yet, after all were checked.

        Args:
            path: The archive.
            trust: The user trusts the archive: its graphs are native code that will run here.

        Returns:
            Which graphs were imported, and which were stored already.

        Raises:
            UntrustedGraphError: `trust` is false.
            GraphCorruptError: The archive, or a graph in it, is damaged.
            StoreError: It is not an archive of this version.
            StoreFullError: It exceeds the limit, or the disk is full.
            StoreReadOnlyError: The folder cannot be written.
        """
        imported, kept = [], []
        with closing(read_archive(path, trust=trust, limit_bytes=self.limit_bytes)) as graphs:
            for header, payload in graphs:
                if is_sound(graph_path(self.folder.graphs, header.key.digest)):
                    kept.append(header.key.digest)
                else:
                    imported.append(self._publish(header, payload).digest)
        return ImportReport(tuple(imported), tuple(kept))

    def add_graph_file(self, digest: str, graph_file: bytes) -> StoredGraph:
        """Return a graph of another store, after storing it here.

        Args:
            digest, graph_file: Digest of the kind's key, and the bytes of the graph's file.

        Raises:
            StoreError: They are damaged, of another kind or version, or cannot be written.
        """
        return self._publish(*checked_graph(digest, graph_file, digest))

    def _publish(self, header: GraphHeader, payload: bytes) -> StoredGraph:
        head, header = encode_head(header)
        size_bytes = len(head) + len(payload)
        if size_bytes > self.limit_bytes:
            raise StoreFullError(
                f"Graph {header.label!r} has {size_bytes} bytes, more than the whole store "
                f"may have ({self.limit_bytes}).",
                "Raise the store's size limit in the settings.",
            )
        digest = header.key.digest
        target = graph_path(self.folder.graphs, digest)
        publish(self.folder, target, [head, payload])
        self._used_here.add(digest)
        self._miss_reasons.pop(digest, None)
        self._make_room()
        return StoredGraph(header, target, size_bytes, header.created_at, payload)

    def _make_room(self) -> None:
        used_bytes = sum(candidate.size_bytes for candidate in eviction.scan(self.folder.graphs))
        if used_bytes <= self.limit_bytes and self._cleaned:
            return
        self._cleaned = True
        try:
            self.prune()
        except StoreError as exc:
            # The graph is stored; the next put tries again to make room.
            _LOG.warning("The store could not be pruned: %s", exc)

    def _mark_used(self, graph: StoredGraph) -> None:
        self._used_here.add(graph.digest)
        self._miss_reasons.pop(graph.digest, None)
        graph.note_use()

    def _note_miss(self, digest: str, reason: str) -> None:
        if self._miss_reasons.get(digest) != reason:
            _LOG.warning("Stored graph %s… is %s", digest[:12], reason)
        self._miss_reasons[digest] = reason

    def _discard_if_corrupt(self, path: Path) -> bool:
        try:
            return remove_if_unusable(self.folder, path)
        except StoreError as exc:
            _LOG.debug("%s stays: %s", path.name, exc)
            return False

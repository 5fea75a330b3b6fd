"""Eviction: deletes the least recently used graphs when the store exceeds its size limit."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from onediff_ext.core.errors import UnsafeFileError
from onediff_ext.core.untrusted_files import open_regular
from onediff_ext.store.atomic_write import collect_stale_parts
from onediff_ext.store.build_records import BuildRecords
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.graph_file import GRAPH_SCHEMA, peek_schema
from onediff_ext.store.stored_graph import graph_paths
from onediff_ext.store.write_errors import mapped_write_errors

_LOG = logging.getLogger(__name__)
_LOCK_TIMEOUT_S = 60.0
_PEEK_BYTES = 12
_ANY_SIZE = 1 << 62  # files that are too large for a graph count too


@dataclass(frozen=True)
class Candidate:
    """A graph file that may be deleted.

    Args:
        path: The file.
        size_bytes: Its length.
        last_used_ns: Its last use, nanoseconds since the epoch.
    """

    path: Path
    size_bytes: int
    last_used_ns: int


@dataclass(frozen=True)
class PruneReport:
    """The result of a prune.

    Args:
        digests: The deleted graphs.
        freed_bytes: Their size.
        part_count: Deleted part files of dead writers.
        kept_bytes: Size of this version's remaining graphs.
    """

    digests: tuple[str, ...] = ()
    freed_bytes: int = 0
    part_count: int = 0
    kept_bytes: int = 0


def prune(
    folder: StoreFolder,
    *,
    limit_bytes: int,
    older_than_s: float | None,
    other_versions: bool,
    used_here: Container[str],
) -> PruneReport:
    """Delete graphs until the rest fits a size, and the leftovers of dead processes.

    Args:
        folder: The store.
        limit_bytes: Size of the remaining graphs, at most.
        older_than_s: Also delete graphs that were not used for so long; None keeps them.
        other_versions: Also delete all graphs of other versions.
        used_here: Digests that this process used; see `choose_evictions`.

    Returns:
        What was deleted; build records have the reasons.

    Raises:
        StoreBusyError: Another process kept pruning for too long.
        StoreReadOnlyError: The folder cannot be written.
    """
    if not (folder.exists() or (other_versions and os.path.isdir(folder.root))):
        return PruneReport()
    folder.prepare()
    with folder.locks.hold("prune", _LOCK_TIMEOUT_S):
        part_count = collect_stale_parts(folder)
        folder.locks.collect()
        candidates = scan(folder.graphs)
        chosen = choose_evictions(
            candidates,
            limit_bytes=limit_bytes,
            unused_since_ns=_before(older_than_s),
            used_here=used_here,
        )
        with mapped_write_errors(folder.graphs):
            gone = [candidate for candidate in chosen if remove_unless_used(folder, candidate)]
            kept_bytes = _size_bytes(candidates) - _size_bytes(gone)
            if other_versions:
                gone += _remove_other_versions(folder)
    digests = tuple(candidate.path.stem for candidate in gone)
    report = PruneReport(digests, _size_bytes(gone), part_count, kept_bytes)
    if digests:
        _record(folder, report, limit_bytes)
    return report


def choose_evictions(
    candidates: Iterable[Candidate],
    *,
    limit_bytes: int,
    unused_since_ns: int | None = None,
    used_here: Container[str] = (),
) -> list[Candidate]:
    """Choose the graphs to delete, oldest use first.

    Args:
        candidates: The graphs.
        limit_bytes: Size of the remaining graphs, at most.
        unused_since_ns: Graphs last used before this time are chosen in any case; nanoseconds
            since the epoch.
        used_here: Digests that this process used. They are chosen last, and never for their age.

    Returns:
        The chosen graphs in the order of their deletion.
    """
    order = sorted(candidates, key=lambda c: (c.path.stem in used_here, c.last_used_ns))
    left_bytes = _size_bytes(order)
    chosen = []
    for candidate in order:
        outdated = (
            unused_since_ns is not None
            and candidate.last_used_ns < unused_since_ns
            and candidate.path.stem not in used_here
        )
        if outdated or left_bytes > limit_bytes:
            chosen.append(candidate)
            left_bytes -= candidate.size_bytes
    return chosen


def scan(graphs: Path) -> list[Candidate]:
    """Return the graph files that this version may evict.

    Files of other versions are left out; they do not count to the size either.

    Args:
        graphs: The folder of the graphs.
    """
    found = []
    for path in graph_paths(graphs):
        try:
            with open_regular(path, limit_bytes=_ANY_SIZE) as file:
                status = os.fstat(file.fileno())
                schema = peek_schema(file.read(_PEEK_BYTES))
        except (OSError, UnsafeFileError):
            continue  # just removed, or unreadable; `verify` reports what is not a regular file
        if schema in (None, GRAPH_SCHEMA):
            found.append(Candidate(path, status.st_size, status.st_mtime_ns))
    return found


def remove_unless_used(folder: StoreFolder, candidate: Candidate) -> bool:
    """Delete a candidate, unless another process used or replaced it since it was listed.

    Args:
        folder: The store.
        candidate: From `scan`.

    Returns:
        Whether this call deleted it.
    """
    with folder.locks.guard():
        try:
            if candidate.path.stat().st_mtime_ns != candidate.last_used_ns:
                return False
            candidate.path.unlink()
        except FileNotFoundError:
            return False
        except PermissionError:
            if os.name != "nt":
                raise
            return False  # Windows: another process is reading it, so it is in use
    return True


def other_versions_files(folder: StoreFolder) -> list[Path]:
    """Return the graph files of other versions of this product.

    Args:
        folder: The store.
    """
    ours = {candidate.path for candidate in scan(folder.graphs)}
    here = [path for path in graph_paths(folder.graphs) if path not in ours and _is_file(path)]
    return here + [p for graphs in folder.other_versions_graphs() for p in graph_paths(graphs)]


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _remove_other_versions(folder: StoreFolder) -> list[Candidate]:
    gone = []
    for path in other_versions_files(folder):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            continue
        path.unlink()
        gone.append(Candidate(path, status.st_size, status.st_mtime_ns))
    return gone


def _record(folder: StoreFolder, report: PruneReport, limit_bytes: int) -> None:
    """Log a prune, and record the reason for each deleted graph."""
    reason = f"least recently used, and the store may have {limit_bytes / 1e9:.3g} GB"
    graph_count, freed_mb = len(report.digests), report.freed_bytes / 1e6
    _LOG.info("Pruned %d graphs, %.1f MB: %s", graph_count, freed_mb, reason)
    build_records = BuildRecords(folder)
    for digest in report.digests:
        build_records.record_eviction(digest, reason)


def _before(older_than_s: float | None) -> int | None:
    return None if older_than_s is None else time.time_ns() - int(older_than_s * 1e9)


def _size_bytes(candidates: Iterable[Candidate]) -> int:
    return sum(candidate.size_bytes for candidate in candidates)

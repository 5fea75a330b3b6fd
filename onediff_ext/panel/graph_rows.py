"""The graph library as rows: one for each checkpoint, and one for graphs of no checkpoint."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from onediff_ext.core.records import ORIGIN_IMPORTED
from onediff_ext.panel import phrases
from onediff_ext.panel.phrases import Phrases
from onediff_ext.store import (
    BuildHistory,
    CheckpointRecords,
    GraphLibrary,
    SavedTime,
    SavedTimes,
    StepRecord,
    StoredGraph,
)

EVERYTHING = "Everything"
UNUSED = "Used by no known checkpoint"


@dataclass(frozen=True)
class GraphGroup:
    """The graphs of one checkpoint. A graph that serves several checkpoints is in each group.

    Args:
        name: The checkpoint's name, which `digests_of` accepts; never a path.
        architecture: Such as ``"sdxl"``; empty for graphs of no checkpoint.
        graphs: The stored graphs, the last used first.
        missing: The number of graphs that the checkpoint uses and the store lacks.
        speedups: (size, times) of each size that a warm-up has measured; with two backends, the
            size names the backend too.
        saved: The time that graphs have saved on this machine; None when nothing was measured.
    """

    name: str
    architecture: str
    graphs: tuple[StoredGraph, ...]
    missing: int = 0
    speedups: tuple[tuple[str, float], ...] = ()
    saved: SavedTime | None = None

    @property
    def speedup(self) -> float | None:
        """The geometric mean over all sizes; None when nothing was measured."""
        times = [speedup for _, speedup in self.speedups]
        return statistics.geometric_mean(times) if times else None

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(graph.size_bytes for graph in self.graphs)

    @property
    def built_at(self) -> float:
        """When the newest graph was built, in seconds since the epoch; 0 without graphs."""
        return max((graph.header.created_at for graph in self.graphs), default=0.0)

    @property
    def used_at(self) -> float:
        """When a graph was last used, in seconds since the epoch; 0 without graphs."""
        return max((graph.last_used_at for graph in self.graphs), default=0.0)

    @property
    def imported(self) -> int:
        """The number of imported graphs."""
        return sum(graph.header.origin == ORIGIN_IMPORTED for graph in self.graphs)

    def as_json(self) -> dict[str, object]:
        """Plain values, for the API."""
        return {
            "checkpoint": self.name,
            "architecture": self.architecture,
            "size_bytes": self.size_bytes,
            "built_at": self.built_at,
            "last_used_at": self.used_at,
            "missing": self.missing,
            "imported": self.imported,
            "speedup": self.speedup,
            "speedups": [{"size": size, "speedup": times} for size, times in self.speedups],
            "saved_s": None if self.saved is None else self.saved.seconds,
            "saved_since": None if self.saved is None else self.saved.since,
            "graphs": [
                {
                    "digest": graph.digest,
                    "label": graph.label,
                    "backend": graph.header.backend,
                    "size_bytes": graph.size_bytes,
                    "build_seconds": graph.header.build_seconds,
                    "created_at": graph.header.created_at,
                    "last_used_at": graph.last_used_at,
                    "origin": graph.header.origin,
                }
                for graph in self.graphs
            ],
        }


def graph_groups(library: GraphLibrary, machine: str = "") -> list[GraphGroup]:
    """Group the stored graphs by checkpoint, in the order of names; graphs of none come last.

    Args:
        library: The store.
        machine: Digest of this machine, for what was measured on it; ``""`` leaves it out.
    """
    stored = {graph.digest: graph for graph in library.entries()}
    saved_times = SavedTimes(library.folder)
    groups: list[GraphGroup] = []
    used: set[str] = set()
    names: dict[str, int] = {}
    for listing in CheckpointRecords(library.folder).list():
        record = listing.record
        mine = [graph for digest, graph in stored.items() if digest in record.kinds]
        used.update(graph.digest for graph in mine)
        number = names[record.name] = names.get(record.name, 0) + 1
        name = record.name if number == 1 else f"{record.name} ({record.content_hash[:8]})"
        steps = BuildHistory(library.folder).steps(machine, record.content_hash)
        saved = saved_times.of(machine, record.content_hash)
        groups.append(
            GraphGroup(
                name,
                record.architecture,
                tuple(mine),
                len(listing.missing),
                _speedups(steps),
                saved,
            )
        )
    rest = tuple(graph for digest, graph in stored.items() if digest not in used)
    if rest:
        groups.append(GraphGroup(UNUSED, "", rest))
    return groups


def digests_of(library: GraphLibrary, name: str) -> list[str]:
    """The digests of the graphs under a name of the table; `EVERYTHING` means all graphs.

    A checkpoint's graphs include those that it shares with another checkpoint.
    """
    if name == EVERYTHING:
        return [graph.digest for graph in library.entries()]
    return [g.digest for group in graph_groups(library) if group.name == name for g in group.graphs]


def _speedups(steps: Sequence[StepRecord]) -> tuple[tuple[str, float], ...]:
    several = len({step.backend for step in steps}) > 1
    return tuple(
        (f"{step.size} ({step.backend})" if several else step.size, step.speedup) for step in steps
    )


def age_text(at: float, words: Phrases = phrases.ENGLISH, now: float | None = None) -> str:
    """``"just now"``, ``"5 min ago"``, ``"3 h ago"``, ``"12 days ago"``; a dash for 0."""
    if not at:
        return "–"
    seconds = max(0.0, (time.time() if now is None else now) - at)
    if seconds < 60:
        return words.say(phrases.JUST_NOW)
    if seconds < 3600:
        return words.say(phrases.MINUTES_AGO, n=f"{seconds / 60:.0f}")
    if seconds < 2 * 86400:
        return words.say(phrases.HOURS_AGO, n=f"{seconds / 3600:.0f}")
    return words.say(phrases.DAYS_AGO, n=f"{seconds / 86400:.0f}")


def size_text(size_bytes: int) -> str:
    """``"850 kB"``, ``"12.3 MB"``, ``"1.2 GB"``."""
    if size_bytes < 1e6:
        return f"{size_bytes / 1e3:.0f} kB"
    if size_bytes < 1e9:
        return f"{size_bytes / 1e6:.1f} MB"
    return f"{size_bytes / 1e9:.2f} GB"

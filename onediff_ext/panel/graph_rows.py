"""The graph library as rows for people: by checkpoint, and what belongs to none."""

from __future__ import annotations

import time
from dataclasses import dataclass

from onediff_ext.core.records import ORIGIN_IMPORTED
from onediff_ext.store import BuildHistory, CheckpointRecords, GraphLibrary, StoredGraph

EVERYTHING = "Everything"
UNUSED = "Used by no known checkpoint"


@dataclass(frozen=True)
class GraphGroup:
    """The graphs of one checkpoint. A graph that serves several is in each of their groups.

    Args:
        name: The checkpoint's name, which `digests_of` takes back; never a path.
        architecture: Such as ``"sdxl"``; empty for graphs of no checkpoint.
        graphs: Those in the store, the last used first.
        missing: How many the checkpoint uses that are not in the store.
        speedup: Measured at the last warm-up; None when it never was.
    """

    name: str
    architecture: str
    graphs: tuple[StoredGraph, ...]
    missing: int = 0
    speedup: float | None = None

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(graph.size_bytes for graph in self.graphs)

    @property
    def built_at(self) -> float:
        """When the newest was built, seconds since the epoch; 0 when there is none."""
        return max((graph.header.created_at for graph in self.graphs), default=0.0)

    @property
    def used_at(self) -> float:
        """When one was last used, seconds since the epoch; 0 when there is none."""
        return max((graph.last_used_at for graph in self.graphs), default=0.0)

    @property
    def imported(self) -> int:
        """How many came from elsewhere."""
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
    """Group the stored graphs by checkpoint, by name; graphs of no checkpoint come last.

    Args:
        library: The store.
        machine: Digest of this machine, for what was measured on it; ``""`` leaves that out.
    """
    stored = {graph.digest: graph for graph in library.entries()}
    groups: list[GraphGroup] = []
    used: set[str] = set()
    names: dict[str, int] = {}
    for listing in CheckpointRecords(library.folder).list():
        record = listing.record
        mine = [graph for digest, graph in stored.items() if digest in record.kinds]
        used.update(graph.digest for graph in mine)
        number = names[record.name] = names.get(record.name, 0) + 1
        name = record.name if number == 1 else f"{record.name} ({record.content_hash[:8]})"
        speedup = _speedup(library, machine, record.content_hash)
        groups.append(
            GraphGroup(name, record.architecture, tuple(mine), len(listing.missing), speedup)
        )
    rest = tuple(graph for digest, graph in stored.items() if digest not in used)
    if rest:
        groups.append(GraphGroup(UNUSED, "", rest))
    return groups


def digests_of(library: GraphLibrary, name: str) -> list[str]:
    """The graphs that a name from the table stands for; `EVERYTHING` for all of them.

    Deleting a checkpoint's graphs also takes those that another checkpoint shares.
    """
    if name == EVERYTHING:
        return [graph.digest for graph in library.entries()]
    return [g.digest for group in graph_groups(library) if group.name == name for g in group.graphs]


def _speedup(library: GraphLibrary, machine: str, content_hash: str) -> float | None:
    steps = BuildHistory(library.folder).steps(machine, content_hash)
    if not steps:
        return None
    from onediff_ext.session.break_even import speedup_of

    return speedup_of(steps)


def age_text(at: float, now: float | None = None) -> str:
    """``"just now"``, ``"5 min ago"``, ``"3 h ago"``, ``"12 days ago"``; a dash for never."""
    if not at:
        return "–"
    seconds = max(0.0, (time.time() if now is None else now) - at)
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min ago"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.0f} h ago"
    return f"{seconds / 86400:.0f} days ago"


def size_text(size_bytes: int) -> str:
    """``"850 kB"``, ``"12.3 MB"``, ``"1.2 GB"``."""
    if size_bytes < 1e6:
        return f"{size_bytes / 1e3:.0f} kB"
    if size_bytes < 1e9:
        return f"{size_bytes / 1e6:.1f} MB"
    return f"{size_bytes / 1e9:.2f} GB"

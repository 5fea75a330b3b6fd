"""Explains a miss: which part of the key differs from the nearest stored graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.words import counted, day_of
from onediff_ext.store.build_records import BuildRecords
from onediff_ext.store.eviction import other_versions_files
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.stored_graph import StoredGraph

# The entry of a key that names the block's class, if the key has one.
CLASS_ENTRY = "block"
_SHOWN_DIFFERENCES = 5
_SHOWN_CHARACTERS = 100


def explain_absence(
    folder: StoreFolder,
    key: KindKey,
    label: str | None,
    entries: Callable[[], Sequence[StoredGraph]],
) -> str:
    """Explain why a kind's graph file is missing: evicted, or built for another key.

    Args:
        folder: The store.
        key: The key of the missing graph.
        label: The label that the missing graph would have, or None.
        entries: Lists the stored graphs.

    Returns:
        A sentence without a full stop.
    """
    evicted = BuildRecords(folder).read(key.digest).eviction
    if evicted is not None:
        return f"deleted on {day_of(evicted.at)}: {evicted.reason}"
    if stored := entries():
        return explain_miss(key, label, stored)
    others = len(other_versions_files(folder))
    kept = counted(others, "graph")
    suffix = f" by this version; the store has {kept} of another version" if others else ""
    return f"nothing stored yet{suffix}"


def explain_miss(key: KindKey, label: str | None, stored: Sequence[StoredGraph]) -> str:
    """Compare a key with the stored graphs.

    Args:
        key: The key of the missing graph.
        label: The label that the missing graph would have, or None.
        stored: The stored graphs.

    Returns:
        A sentence without a full stop, e.g. ``'nearest stored graph
        "ResnetBlock2D 320→640" differs in torch 2.13.0 → 2.14.0'``.
    """
    if not stored:
        return "nothing stored yet"
    nearest = min(stored, key=lambda graph: _distance(key, label, graph))
    wanted, found = key.entries.get(CLASS_ENTRY), nearest.key.entries.get(CLASS_ENTRY)
    if wanted is not None and found is not None and wanted != found:
        return f"no graph of a {wanted.rpartition('.')[2]} is stored yet"
    differences = [_shortened(line) for line in key.differences(nearest.key)]
    shown = differences[:_SHOWN_DIFFERENCES]
    if hidden := len(differences) - len(shown):
        shown.append(f"and {hidden} more")
    return f'nearest stored graph "{nearest.label}" differs in {", ".join(shown)}'


def _distance(
    key: KindKey, label: str | None, graph: StoredGraph
) -> tuple[bool, bool, int, float, str]:
    wanted_class = key.entries.get(CLASS_ENTRY)
    return (
        label is not None and graph.label != label,
        graph.key.entries.get(CLASS_ENTRY) != wanted_class,
        len(key.differences(graph.key)),
        -graph.header.created_at,
        graph.digest,
    )


def _shortened(line: str) -> str:
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 1]}…"

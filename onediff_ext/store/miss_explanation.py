"""Why a graph is not in the store, in words."""

from __future__ import annotations

from collections.abc import Sequence

from onediff_ext.core.kind_key import KindKey
from onediff_ext.store.stored_graph import StoredGraph

# The entry of a key that names the block's class, if the key has one.
CLASS_ENTRY = "block"
_SHOWN_DIFFERENCES = 5
_SHOWN_CHARACTERS = 100


def explain_miss(key: KindKey, label: str | None, stored: Sequence[StoredGraph]) -> str:
    """Compare a key with what is stored.

    Args:
        label: The label that the missing graph would have, if known.

    Returns:
        A sentence without its full stop, e.g. ``'nearest stored graph
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

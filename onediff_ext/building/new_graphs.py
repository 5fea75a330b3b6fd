"""Stores a new graph with all that later processes need to know of it."""

from __future__ import annotations

from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import BuildRecords, GraphLibrary, StoredGraph


def store_new_graph(
    library: GraphLibrary,
    key: KindKey,
    payload: bytes,
    *,
    label: str,
    backend: str,
    machine: str,
    build_s: float,
) -> StoredGraph:
    """Store a graph, and its load check.

    Args:
        library: Where it is stored.
        key: The key of the graph's kind.
        payload: The graph's bytes. The worker that built them has tried them out.
        label: Of the kind.
        backend: The backend's name.
        machine: From `machine_digest`.
        build_s: Seconds in the worker.

    Raises:
        StoreError: The store cannot be written.
    """
    stored = library.put(
        key, payload, label=label, backend=backend, build_seconds=build_s, details={}
    )
    # Kept apart from the graph file: what a file says about itself is not believed.
    BuildRecords(library.folder).record_load_check(
        stored.digest, label, machine=machine, payload_sha256=stored.header.payload_sha256
    )
    return stored

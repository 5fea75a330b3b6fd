"""The status of a checkpoint as the store knows it, without its model."""

from __future__ import annotations

import torch

from onediff_ext import __version__
from onediff_ext.building.builder import worker_count
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.records import CheckpointRecord
from onediff_ext.core.status import COMPILED_IN_PART, Status
from onediff_ext.engine.machine import machine_digest
from onediff_ext.session.break_even import pictures_until_it_pays, speedup_of
from onediff_ext.store import BuildHistory, BuildRecords, GraphLibrary

# Kinds recorded within so long of the latest ones were used by the same run.
_SAME_RUN_S = 3600.0


def stored_status(
    library: GraphLibrary, record: CheckpointRecord, device: torch.device, options: CompileOptions
) -> Status:
    """What is ready, failed and being built of the kinds that a checkpoint used last.

    Args:
        library: The store.
        record: Of the checkpoint.
        device: Where it would be drawn.
        options: For the number of workers.
    """
    latest = max((use.last_used_at for use in record.kinds.values()), default=0.0)
    digests = [d for d, use in record.kinds.items() if latest - use.last_used_at < _SAME_RUN_S]
    labels = {graph.digest: graph.label for graph in library.entries()}
    build_records, history = BuildRecords(library.folder), BuildHistory(library.folder)
    machine = machine_digest(device)
    ready = [digest for digest in digests if digest in labels]
    failures = [
        verdict
        for digest in digests
        if digest not in labels
        and (verdict := build_records.read(digest)).failure is not None
        and verdict.failure.version == __version__
    ]
    failed = {verdict.digest for verdict in failures}
    missing = [digest for digest in digests if digest not in labels and digest not in failed]
    building = [digest for digest in missing if library.is_being_built(digest)]
    expected = history.build_seconds(machine, [build_records.read(d).label for d in missing])
    known = [seconds for seconds in expected if seconds is not None]
    steps = history.steps(machine, record.content_hash)
    workers = worker_count(options)
    running = "eager"
    if ready:
        running = "compiled" if len(ready) == len(digests) else COMPILED_IN_PART
    return Status(
        running=running,
        kinds_ready=len(ready),
        kinds_failed=len(failures),
        kinds_needed=len(digests),
        building=bool(building),
        seconds_left=sum(known) / workers if building and len(known) == len(missing) else None,
        building_now=tuple(build_records.read(d).label or d[:12] for d in building),
        waiting=len(missing) - len(building),
        speedup=speedup_of(steps),
        pays_off_after=pictures_until_it_pays(history, [labels[d] for d in ready], workers, steps),
        reasons=tuple(f"{v.label}: {v.failure.reason}" for v in failures if v.failure),
    )

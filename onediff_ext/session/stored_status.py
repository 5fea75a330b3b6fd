"""The status of a checkpoint from the store alone, without its model."""

from __future__ import annotations

import torch

from onediff_ext import __version__
from onediff_ext.building.worker_counts import worker_count
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.records import CheckpointRecord
from onediff_ext.core.status import COMPILED_IN_PART, Status
from onediff_ext.engine.machine import machine_digest
from onediff_ext.session.break_even import pictures_until_it_pays, speedup_of
from onediff_ext.store import BuildHistory, BuildRecords, GraphLibrary

# Kinds recorded at most so long before the latest ones belong to the same run.
_SAME_RUN_S = 3600.0


def stored_status(
    library: GraphLibrary, record: CheckpointRecord, device: torch.device, options: CompileOptions
) -> Status:
    """Count which of a checkpoint's last used kinds are ready, failed or being built.

    Args:
        library: The stored graphs.
        record: The checkpoint's record.
        device: The device that it would be drawn on.
        options: For the number of workers, and the backend where nothing was measured.

    Returns:
        A status with the fields that need no session; the others have their defaults.
    """
    latest = max((use.last_used_at for use in record.kinds.values()), default=0.0)
    digests = [d for d, use in record.kinds.items() if latest - use.last_used_at < _SAME_RUN_S]
    labels = {graph.digest: graph.label for graph in library.entries()}
    build_records, history = BuildRecords(library.folder), BuildHistory(library.folder)
    machine = machine_digest(device)
    ready = [digest for digest in digests if digest in labels]
    failures = [
        build_record
        for digest in digests
        if digest not in labels
        and (build_record := build_records.read(digest)).failure is not None
        and build_record.failure.version == __version__
    ]
    failed = {build_record.digest for build_record in failures}
    missing = [digest for digest in digests if digest not in labels and digest not in failed]
    building = [digest for digest in missing if library.is_being_built(digest)]
    # The store does not say which backend is chosen: the one that was measured last counts.
    measured = history.steps(machine, record.content_hash)
    backend = measured[-1].backend if measured else options.backend
    expected = history.build_seconds(
        machine, backend, [build_records.read(d).label for d in missing]
    )
    known = [seconds for seconds in expected if seconds is not None]
    steps = [step for step in measured if step.backend == backend]
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

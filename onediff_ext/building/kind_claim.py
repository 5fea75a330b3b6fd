"""Claims a kind for this process, and decides whether its graph is built, checked or loaded."""

from __future__ import annotations

from contextlib import ExitStack

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.build_jobs import Job
from onediff_ext.engine.blocks.block_kind import BlockKind


def claim_kind(context: BuildContext, kind: BlockKind, lock_timeout_s: float) -> Job | None:
    """Take a kind's build lock and look at what the store knows.

    Args:
        context: The store, and what is known of builds.
        kind: Fails when an earlier process gave it up, or when it has no graph and nothing may be
            built.
        lock_timeout_s: How long to wait for a process that is building the kind.

    Returns:
        A job that holds the lock; None when the kind has failed. The job's graph is loaded when
        it `has_passed`, checked when it has a `stored` graph, else built.

    Raises:
        StoreBusyError: Another process is building the kind.
        OneDiffError: The store cannot be used.
    """
    with ExitStack() as locks:
        locks.enter_context(context.build_lock(kind, lock_timeout_s))
        return _job_for(context, kind, locks)


def _job_for(context: BuildContext, kind: BlockKind, locks: ExitStack) -> Job | None:
    event_log, trust = context.event_log, context.graph_trust
    failure = context.outcomes.known_failure(kind)
    if failure is not None:
        kind.fail(failure)
        event_log.note("failed", kind.label, failure)
        return None
    reason = trust.missing_reason(kind)
    stored = trust.usable_graph(kind)
    if stored is None and not context.may_build:
        kind.fail(reason)
        return None
    if stored is not None and trust.is_load_safe(stored, kind) and not trust.differed_here(stored):
        return Job(kind, locks.pop_all(), stored=stored, has_passed=True, reason=reason)
    event_log.note("build" if stored is None else "load check", kind.label, reason)
    return Job(kind, locks.pop_all(), stored=stored, reason=reason)

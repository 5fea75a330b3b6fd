"""The status of a session at one moment."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from onediff_ext.core.status import Status
from onediff_ext.engine.kinds import Kind, KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.service.break_even import pictures_until_it_pays, speedup_of

if TYPE_CHECKING:
    from onediff_ext.service.session import Session

_SHOWN_REASONS = 5


def session_status(session: Session, since: Counter[tuple[str, str]] | None = None) -> Status:
    """Look at a session; see `Status` for what each field says, `Session.status` for `since`."""
    kinds = session.current_kinds()
    ready = sum(kind.graph is not None for kind in kinds)
    failed = sum(kind.state is KindState.FAILED for kind in kinds)
    missing = len(kinds) - ready - failed
    run = session.builder.run
    building = session.background.is_building or run is not None
    captures = len(session.captures)
    running = "compiled" if ready else "captured" if captures else "eager"
    stage = session.stage or ("" if run is None else run.stage)
    if not stage and session.read_ahead.is_reading:
        stage = "reading"
    steps = []
    if kinds and session.checkpoint is not None:
        machine = machine_digest(kinds[0].device)
        steps = session.builder.history.steps(machine, session.checkpoint.content_hash)
    return Status(
        running=running,
        kinds_ready=ready,
        kinds_failed=failed,
        kinds_needed=len(kinds),
        building=building,
        seconds_left=None if run is None else run.seconds_left(),
        stage=stage,
        sizes_done=session.sizes_done[0],
        sizes_needed=session.sizes_done[1],
        building_now=() if run is None else run.building_now,
        waiting=0 if building else missing,
        cancelled=session.background.cancelled,
        captures=captures,
        speedup=speedup_of(steps),
        pays_off_after=pictures_until_it_pays(
            session.builder.history,
            [kind.label for kind in kinds if kind.graph is not None],
            session.builder.worker_count,
            steps,
        ),
        problem=session.builder.problem,
        reasons=_reasons(session, kinds, missing, since),
    )


def _reasons(
    session: Session, kinds: list[Kind], missing: int, since: Counter[tuple[str, str]] | None
) -> tuple[str, ...]:
    by_reason: dict[str, list[str]] = {}
    for fallback in session.fallbacks(since):
        by_reason.setdefault(fallback.reason, []).append(fallback.what)
    # What failed between two pictures has had no call yet.
    for kind in kinds:
        if kind.state is KindState.FAILED:
            whats = by_reason.setdefault(kind.reason, [])
            if kind.label not in whats:
                whats.append(kind.label)
    reasons = [
        f"{whats[0]}: {reason}" if len(whats) == 1 else f"{reason} ({len(whats)} kinds of block)"
        for reason, whats in by_reason.items()
    ]
    if missing and not reasons:
        if session.background.cancelled:
            reasons.append("builds were cancelled")
        elif session.options.build == "never":
            reasons.append("graphs are missing, and none may be built")
    return tuple(reasons[:_SHOWN_REASONS])

"""The status of a session at one moment."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from onediff_ext.core.status import COMPILED_IN_PART, Status
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.engine.quantization import PRECISIONS, unavailable_reason
from onediff_ext.engine.running.block_runner import NO_GRAPH_YET, BlockRunner
from onediff_ext.session.break_even import pictures_until_it_pays, speedup_of

if TYPE_CHECKING:
    from onediff_ext.session.session import Session

_SHOWN_REASONS = 5
CANCELLED = "builds were cancelled; a warm-up builds what is missing"
NOT_BUILT = "graphs are missing, and none may be built"


def session_status(session: Session, since: Counter[tuple[str, str]] | None = None) -> Status:
    """Look at a session; see `Status` for what each field says, `Session.status` for `since`."""
    kinds = session.current_kinds()
    ready = sum(kind.graph is not None for kind in kinds)
    failed = sum(kind.state is KindState.FAILED for kind in kinds)
    missing = len(kinds) - ready - failed
    run = session.builder.run
    building = session.background.is_building or run is not None
    captures = len(session.captures)
    cancelled = any(map(session.background.is_cancelled, session.missing()))
    compiled, eager_blocks = _blocks(session)
    needed = compiled + sum(eager_blocks.values())
    if compiled == needed > 0 or (not needed and ready == len(kinds) > 0):
        running = "compiled"
    elif compiled if needed else ready:
        running = COMPILED_IN_PART
    else:
        running = "captured" if captures else "eager"
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
        cancelled=cancelled,
        captures=captures,
        speedup=speedup_of(steps),
        pays_off_after=pictures_until_it_pays(
            session.builder.history,
            [kind.label for kind in kinds if kind.graph is not None],
            session.builder.worker_count,
            steps,
        ),
        problem=session.builder.problem,
        reasons=_reasons(session, kinds, missing, eager_blocks, since),
        blocks_compiled=compiled,
        blocks_needed=needed,
        eager_blocks=tuple(eager_blocks.most_common()),
        substituted=_substituted(session, kinds),
    )


def _blocks(session: Session) -> tuple[int, Counter[str]]:
    """Blocks that drew the last picture and have a graph now, and the others by their reason."""
    compiled, eager = 0, Counter[str]()
    for component in session.last_picture.components:
        for runner in list(component.runners):
            if runner.eager_reason == "":
                continue  # it was not called
            reason = _why_eager(session, runner)
            if reason is None:
                compiled += 1
            else:
                eager[reason] += 1
    return compiled, eager


def _why_eager(session: Session, runner: BlockRunner) -> str | None:
    reason, kind = runner.eager_reason, runner.used
    if kind is None or (kind.graph is not None and reason != NO_GRAPH_YET):
        return reason
    if kind.graph is not None:
        return None  # since then
    if kind.state is KindState.FAILED:
        return kind.reason
    if session.background.is_cancelled(kind):
        return CANCELLED
    if session.options.build == "never" and not session.is_being_proved(kind):
        return NOT_BUILT
    return kind.reason or NO_GRAPH_YET


def _substituted(session: Session, kinds: list[BlockKind]) -> str:
    """What was asked for and cannot be had, with its reason."""
    texts = [session.substituted] if session.substituted else []
    if session.precision in PRECISIONS and kinds:
        reason = unavailable_reason(session.precision, kinds[0].device)
        if reason is not None:
            texts.append(reason)
    return "; ".join(texts)


def _reasons(
    session: Session,
    kinds: list[BlockKind],
    missing: int,
    eager_blocks: Counter[str],
    since: Counter[tuple[str, str]] | None,
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
    # Of the last picture, calls that were not counted: the graph is missing.
    for reason in eager_blocks:
        if reason != NO_GRAPH_YET:
            by_reason.setdefault(reason, [])
    if missing and not by_reason:
        if any(map(session.background.is_cancelled, kinds)):
            by_reason[CANCELLED] = []
        elif session.options.build == "never":
            by_reason[NOT_BUILT] = []
    most_blocks_first = sorted(by_reason, key=lambda reason: -eager_blocks[reason])
    reasons = [_reason(reason, by_reason[reason]) for reason in most_blocks_first]
    return tuple(reasons[:_SHOWN_REASONS])


def _reason(reason: str, whats: list[str]) -> str:
    if not whats:
        return reason
    if len(whats) == 1:
        return f"{whats[0]}: {reason}"
    return f"{reason} ({len(whats)} kinds of block)"

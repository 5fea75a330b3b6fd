"""The status of a session at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Sized
from typing import Protocol

import torch

from onediff_ext.building.background_builds import BackgroundBuilds
from onediff_ext.building.builder import Builder
from onediff_ext.building.idle_tuning import IdleTuning
from onediff_ext.building.read_ahead import ReadAhead
from onediff_ext.building.worker_counts import worker_count
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.status import COMPILED_IN_PART, Status
from onediff_ext.engine.backend_port import Backend
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.engine.running.block_runner import NO_GRAPH_YET
from onediff_ext.session.break_even import pictures_until_it_pays, speedup_of
from onediff_ext.session.checkpoint_use import CheckpointUse
from onediff_ext.session.last_picture import DrawnBlock, Fallback, LastPicture
from onediff_ext.session.picture_timer import PictureTimer
from onediff_ext.session.substitutes import Substitute
from onediff_ext.store import SavedTimes

_SHOWN_REASONS = 5
CANCELLED = "builds were cancelled; the next picture has its missing graphs built"
PAUSED = "builds are paused until Go on"
NOT_BUILT = "graphs are missing, and none may be built"


class StatusSource(Protocol):
    """The part of a session that the status reads; see `Session`."""

    @property
    def options(self) -> CompileOptions: ...
    @property
    def builder(self) -> Builder: ...
    @property
    def background(self) -> BackgroundBuilds: ...
    @property
    def tuning(self) -> IdleTuning: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def read_ahead(self) -> ReadAhead: ...
    @property
    def cuda_graphs(self) -> Sized: ...
    @property
    def checkpoint(self) -> CheckpointUse | None: ...
    @property
    def last_picture(self) -> LastPicture: ...
    @property
    def timer(self) -> PictureTimer: ...
    @property
    def stage(self) -> str: ...
    @property
    def sizes_done(self) -> tuple[int, int]: ...

    def substitutes(self, device: torch.device | None = None) -> Sequence[Substitute]: ...
    def current_kinds(self) -> list[BlockKind]: ...
    def missing(self) -> list[BlockKind]: ...
    def awaits_load_check(self, kind: BlockKind) -> bool: ...
    def fallbacks(self, since: Counter[tuple[str, str]] | None = None) -> Sequence[Fallback]: ...


def session_status(session: StatusSource, since: Counter[tuple[str, str]] | None = None) -> Status:
    """Return the status of a session at this moment.

    Args:
        session: Its builds, kinds and last picture are read.
        since: As in `Session.status`.
    """
    context = session.builder.context
    kinds = session.current_kinds()
    ready = sum(kind.graph is not None for kind in kinds)
    failed = sum(kind.state is KindState.FAILED for kind in kinds)
    missing = len(kinds) - ready - failed
    run = session.builder.run
    building = session.background.is_building or run is not None
    tuning = session.tuning
    captures = len(session.cuda_graphs)
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
    steps, last, saved = [], session.timer.last, None
    if kinds and session.checkpoint is not None:
        machine, content_hash = machine_digest(kinds[0].device), session.checkpoint.content_hash
        steps = context.history.steps(machine, content_hash, session.backend.name)
        saved = SavedTimes(context.library.folder).of(machine, content_hash)
    sizes = frozenset() if last is None else last.sizes
    mine = [step for step in steps if step.size in sizes]
    size_is_measured = bool(sizes) and sizes == {step.size for step in mine}
    seconds_left = None if run is None else run.seconds_left()
    return Status(
        running=running,
        kinds_ready=ready,
        kinds_failed=failed,
        kinds_needed=len(kinds),
        building=building,
        seconds_left=seconds_left,
        first_graph_s=None if run is None or seconds_left is not None else run.first_graph_s(),
        building_s=None if run is None else run.times.spent_s,
        stage=stage,
        sizes_done=session.sizes_done[0],
        sizes_needed=session.sizes_done[1],
        building_now=() if run is None else run.building_now,
        waiting=0 if building else missing,
        cancelled=cancelled,
        paused=session.background.is_paused,
        tuned=tuning.kinds_done,
        to_tune=tuning.kinds_wanted,
        tuning_gain=tuning.gain(kinds),
        captures=captures,
        speedup=speedup_of(mine if size_is_measured else () if sizes else steps),
        pays_off_after=pictures_until_it_pays(
            context.history,
            [kind.label for kind in kinds if kind.graph is not None],
            worker_count(session.options),
            steps,
        ),
        problem=context.outcomes.blocked_reason,
        reasons=_reasons(session, kinds, missing, eager_blocks, since),
        blocks_compiled=compiled,
        blocks_needed=needed,
        eager_blocks=tuple(eager_blocks.most_common()),
        substituted=_substituted(session, kinds),
        backend=session.backend.name,
        changed_by=_changed_by(session),
        first_builds_s=None if run is None else run.times.whole_s(seconds_left),
        picture_s=None if last is None else last.seconds,
        without_s=None if last is None else last.without_s,
        size_is_measured=size_is_measured,
        other_pace=last is not None and last.other_pace,
        saved_s=None if saved is None else saved.seconds,
        saved_since=None if saved is None else saved.since,
    )


def _changed_by(session: StatusSource) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for drawn in session.last_picture.drawn():
        found |= dict(drawn.changed_by)
    return tuple(found.items())


def _blocks(session: StatusSource) -> tuple[int, Counter[str]]:
    """Count the last picture's blocks that have a graph now, and the others by eager reason."""
    compiled, eager = 0, Counter[str]()
    for drawn in session.last_picture.drawn():
        for block in drawn.blocks:
            reason = _eager_reason(session, block)
            if reason is None:
                compiled += 1
            else:
                eager[reason] += 1
        for reason, blocks in drawn.replaced:
            eager[reason] += blocks
    return compiled, eager


def _eager_reason(session: StatusSource, block: DrawnBlock) -> str | None:
    reason, kind = block.eager_reason, block.kind
    if kind is None:
        return reason
    if kind.graph is not None:
        # It came after the picture, or passed its comparison after it.
        is_ready = reason == NO_GRAPH_YET or kind.state is KindState.READY
        return None if is_ready else reason
    if kind.state is KindState.FAILED:
        return kind.reason
    if session.background.is_paused:
        return PAUSED
    if session.background.is_cancelled(kind):
        return CANCELLED
    if session.options.build == "never" and not session.awaits_load_check(kind):
        return NOT_BUILT
    return kind.reason or NO_GRAPH_YET


def _substituted(session: StatusSource, kinds: list[BlockKind]) -> str:
    """Why another backend or precision is used than the chosen one."""
    device = kinds[0].device if kinds else None
    return "; ".join(substitute.reason for substitute in session.substitutes(device))


def _reasons(
    session: StatusSource,
    kinds: list[BlockKind],
    missing: int,
    eager_blocks: Counter[str],
    since: Counter[tuple[str, str]] | None,
) -> tuple[str, ...]:
    by_reason: dict[str, list[str]] = {}
    for fallback in session.fallbacks(since):
        by_reason.setdefault(fallback.reason, []).append(fallback.what)
    # A kind that failed between two pictures has had no call yet.
    for kind in kinds:
        if kind.state is KindState.FAILED:
            whats = by_reason.setdefault(kind.reason, [])
            if kind.label not in whats:
                whats.append(kind.label)
    # Calls of the last picture that were not counted, since their graph is missing.
    for reason in eager_blocks:
        if reason != NO_GRAPH_YET:
            by_reason.setdefault(reason, [])
    if missing and not by_reason:
        if session.background.is_paused:
            by_reason[PAUSED] = []
        elif any(map(session.background.is_cancelled, kinds)):
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

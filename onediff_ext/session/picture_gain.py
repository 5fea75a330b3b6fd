"""One picture of a session, and what graphs saved with it: shown, and added up in the store."""

from __future__ import annotations

from collections.abc import Sized
from contextlib import AbstractContextManager
from typing import Protocol

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.machine import machine_digest
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.session.checkpoint_use import CheckpointUse
from onediff_ext.session.last_picture import LastPicture
from onediff_ext.session.picture_timer import PictureTimer
from onediff_ext.session.session_memory import SessionMemory
from onediff_ext.store import SavedTimes, StepRecord


class PictureSource(Protocol):
    """What this module reads of a session; `Session` says what each of it is."""

    @property
    def build_context(self) -> BuildContext: ...
    @property
    def checkpoint(self) -> CheckpointUse | None: ...
    @property
    def timer(self) -> PictureTimer: ...
    @property
    def cuda_graphs(self) -> Sized: ...
    @property
    def foreground(self) -> ForegroundScheduler: ...
    @property
    def last_picture(self) -> LastPicture: ...
    @property
    def memory(self) -> SessionMemory: ...

    def after_picture(self) -> None: ...
    def current_kinds(self) -> list[BlockKind]: ...


class Picture(AbstractContextManager[None]):
    """Draws one picture of a session within the ``with`` block; it may be nested.

    Args:
        session: Whose models draw the picture.
    """

    def __init__(self, session: PictureSource) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session.foreground.begin_picture()
        self._session.timer.begin()

    def __exit__(self, _cls: object, exc: BaseException | None, _frames: object) -> None:
        if exc is not None:
            self._session.timer.interrupt()
            if is_out_of_memory(exc):
                self._session.memory.give_back(ran_out=True)
        _stop_timer(self._session)
        self._session.last_picture.keep()
        self._session.foreground.end_picture()
        self._session.after_picture()


def _stop_timer(session: PictureSource) -> None:
    """Stop the clock at a picture's end, and add what graphs saved to the store's total.

    Only pictures at sizes that a warm-up has measured count.

    Args:
        session: The session that drew the picture.
    """
    kinds, checkpoint = session.current_kinds(), session.checkpoint
    if not kinds or checkpoint is None or not _graphs_served(session):
        session.timer.end(None)
        return
    context, machine = session.build_context, machine_digest(kinds[0].device)

    def steps() -> dict[str, StepRecord]:
        measured = context.history.steps(machine, checkpoint.content_hash, context.backend.name)
        return {step.size: step for step in measured}

    taken = session.timer.end(steps)
    if taken is not None and taken.without_s is not None:
        saved_s = taken.without_s - taken.seconds
        SavedTimes(context.library.folder).add(machine, checkpoint.content_hash, saved_s)


def _graphs_served(session: PictureSource) -> bool:
    """Whether a block of the picture ran its graph, or steps were replayed as CUDA graphs."""
    components = session.last_picture.components
    runners = [runner for component in components for runner in list(component.runners)]
    return bool(session.cuda_graphs) or any(runner.eager_reason is None for runner in runners)

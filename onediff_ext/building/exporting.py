"""Exports kinds where it disturbs the pictures least.

`torch.export` computes in Python for half a second a kind. Meanwhile it changes the whole process:
it replaces `builtins.max` and `math.pow`, and `torch.compiler.is_compiling()` is true in every
thread (torch 2.13). A picture that is drawn at that moment waits, and may take other branches.

On Linux forked children export (`forked_exporter.py`). Elsewhere, or when a child fails, this
process exports while no picture is being drawn, and between two steps of a picture that takes long.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from onediff_ext.building.build_share import BuildShare
from onediff_ext.building.export_result import ExportResult
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.building.forked_exporter import ForkedExporter
from onediff_ext.building.torch_lock import TORCH_LOCK
from onediff_ext.core.errors import BlockGoneError, ExportError, NoMemoryError, OneDiffError
from onediff_ext.core.priority import SessionPriorities, usable_cores
from onediff_ext.engine.blocks.block_kind import BlockKind

logger = logging.getLogger(__name__)

FORK_PAUSE_S = 0.05  # measured: 45 ms with 1 GB of process
_PREPARE_S = 0.02
_EXPORT_S = 0.4  # what fits between two pictures
_POLL_S = 0.1


def can_fork() -> bool:
    """Whether this system's processes survive a fork beside other threads."""
    return sys.platform == "linux" and hasattr(os, "fork")


def export_all(
    kinds: Sequence[BlockKind],
    foreground: ForegroundScheduler,
    stop: threading.Event,
    *,
    share: BuildShare | None = None,
    children: int | None = None,
    in_background: bool = True,
) -> Iterator[ExportResult]:
    """Export kinds; ends early when `stop` is set.

    Args:
        kinds: The most useful first.
        foreground: Says when this process may be disturbed.
        stop: Ends the exports at once.
        share: What exports may take from pictures; None takes the least.
        children: Forked processes at the same time; 0 exports in this process; None depends on the
            number of cores.
        in_background: At a low priority.

    Yields:
        Each result as soon as it is there.
    """
    share = share or BuildShare(foreground)
    if children is None:
        children = max(1, min(4, usable_cores() // 4)) if can_fork() else 0
    left = list(kinds)
    if children:
        done: set[int] = set()
        for exported in _export_in_children(left, foreground, stop, share, children, in_background):
            is_gone = isinstance(exported.error, BlockGoneError)  # it is gone here as well
            if exported.program is None and not is_gone:
                logger.debug("%s: %s; tried again here", exported.kind.label, exported.error)
                continue
            done.add(id(exported.kind))
            yield exported
        left = [kind for kind in left if id(kind) not in done]
    for kind in left:
        turn_share = share.of_turns(kind.device)
        with foreground.turn(_EXPORT_S, alone=True, stop=stop, share=turn_share) as granted:
            if stop.is_set() or not granted:
                return
            exported = _export_here(kind)
        yield exported


def _export_here(kind: BlockKind) -> ExportResult:
    try:
        with TORCH_LOCK:
            return ExportResult(kind, kind.export())
    except OneDiffError as exc:
        return ExportResult(kind, None, exc)
    except MemoryError:
        return ExportResult(kind, None, NoMemoryError("There is no memory to export a block."))
    except Exception as exc:  # of this kind alone: the others go on
        return ExportResult(kind, None, _export_error(exc))


def _export_error(exc: Exception) -> ExportError:
    return ExportError(f"The block cannot be exported: {type(exc).__name__}: {exc}")


def _export_in_children(
    kinds: list[BlockKind],
    foreground: ForegroundScheduler,
    stop: threading.Event,
    share: BuildShare,
    count: int,
    in_background: bool,
) -> Iterator[ExportResult]:
    device = kinds[0].device
    ready: list[tuple[BlockKind, Callable[[], bytes]]] = []
    for kind in kinds:
        try:  # the child traces on the CPU: it cannot even ask for the number of GPUs
            with foreground.turn(_PREPARE_S, stop=stop, share=share.of_turns(device)) as granted:
                if stop.is_set() or not granted:
                    return
                ready.append((kind, kind.prepare_export(torch.device("cpu"))))
        except OneDiffError as exc:
            yield ExportResult(kind, None, exc)
        except Exception as exc:
            yield ExportResult(kind, None, _export_error(exc))
    batches = [ready[i::count] for i in range(count) if ready[i::count]]
    children: list[ForkedExporter] = []
    giving_way = SessionPriorities()
    try:
        while (batches or children) and not stop.is_set():
            while batches:
                turn_share = share.of_turns(device)
                with foreground.turn(FORK_PAUSE_S, stop=stop, share=turn_share) as granted:
                    if stop.is_set() or not granted:
                        return
                    try:
                        children.append(ForkedExporter(batches[0], in_background))
                    except OSError as exc:  # no memory for a copy of this process
                        if children:
                            break  # there may be memory when one of them has ended
                        reason = NoMemoryError(f"This process cannot be forked ({exc.strerror}).")
                        for kind, _ in batches[0]:
                            yield ExportResult(kind, None, reason)
                del batches[0]
            drawing = in_background and foreground.is_drawing
            for child in children:
                giving_way.tell(child.pid, drawing, share.of_processors(device))
            readable, _, _ = select.select([c.pipe for c in children], [], [], _POLL_S)
            for child in list(children):
                if child.pipe in readable:
                    yield from child.read()
                if child.finished or child.is_silent(share.pace(device) if in_background else 1.0):
                    yield from child.end_and_report()
                    children.remove(child)
    finally:
        for child in children:
            child.kill()

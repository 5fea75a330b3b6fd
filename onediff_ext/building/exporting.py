"""Exports kinds where it disturbs the pictures least.

`torch.export` computes in Python for half a second a kind and changes the whole process while it
does: it replaces `builtins.max` and `math.pow`, and `torch.compiler.is_compiling()` turns true in
every thread (torch 2.13). A picture that is drawn meanwhile waits, and may take other branches.
On Linux a forked child exports, which has the host's classes as they are now, patches of other
extensions included; torch's own DataLoader forks the same way beside CUDA. A child cannot reach the
GPU, so it traces as if on the CPU, with what autocast does on a GPU written out, and the worker
puts the program on the GPU. Elsewhere, or when the child fails, this process does it while no
picture is being drawn.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.core.errors import (
    BlockGoneError,
    ExportError,
    NoMemoryError,
    OneDiffError,
    WorkerLostError,
)
from onediff_ext.core.priority import GivingWay, step_back, usable_cores
from onediff_ext.engine.blocks.block_kind import BlockKind

logger = logging.getLogger(__name__)

# torch can do only one export, or load of an exported program, at a time in a process.
TORCH_LOCK = threading.RLock()

_HEAD = struct.Struct("<IQ")  # index of the kind, bytes that follow
_FORK_PAUSE_S = 0.05  # measured: 45 ms with 1 GB of process
_PREPARE_S = 0.02
_EXPORT_S = 0.4  # what fits between two pictures
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
# Without any sign of life for so long, a child is taken for hanging.
CHILD_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Exported:
    """One kind's program, or why there is none."""

    kind: BlockKind
    program: bytes | None
    error: OneDiffError | None = None


def can_fork() -> bool:
    """Whether this system's processes survive a fork beside other threads."""
    return sys.platform == "linux" and hasattr(os, "fork")


def export_all(
    kinds: Sequence[BlockKind],
    foreground: ForegroundScheduler,
    stop: threading.Event,
    *,
    children: int | None = None,
    in_background: bool = True,
) -> Iterator[Exported]:
    """Export kinds and yield each as it comes; ends early when `stop` is set.

    Args:
        kinds: The most useful first.
        foreground: Says when this process may be disturbed.
        stop: Ends the exports at once.
        children: Forked processes at the same time; 0 exports in this process; None is by cores.
        in_background: At a low priority.
    """
    if children is None:
        children = max(1, min(4, usable_cores() // 4)) if can_fork() else 0
    left = list(kinds)
    if children:
        done: set[int] = set()
        for exported in _export_in_children(left, foreground, stop, children, in_background):
            if isinstance(exported.error, BlockGoneError):  # here as well
                done.add(id(exported.kind))
                yield exported
                continue
            if exported.program is None:
                logger.debug("%s: %s; tried again here", exported.kind.label, exported.error)
                continue
            done.add(id(exported.kind))
            yield exported
        left = [kind for kind in left if id(kind) not in done]
    for kind in left:
        with foreground.turn(_EXPORT_S, alone=True, stop=stop) as granted:
            if stop.is_set() or not granted:
                return
            exported = _export_here(kind)
        yield exported


def _export_here(kind: BlockKind) -> Exported:
    try:
        with TORCH_LOCK:
            return Exported(kind, kind.export())
    except OneDiffError as exc:
        return Exported(kind, None, exc)
    except MemoryError:
        return Exported(kind, None, NoMemoryError("There is no memory to export a block."))
    except Exception as exc:  # of this kind alone: the others go on
        return Exported(kind, None, _failed(exc))


def _failed(exc: Exception) -> ExportError:
    return ExportError(f"The block cannot be exported: {type(exc).__name__}: {exc}")


def _export_in_children(
    kinds: list[BlockKind],
    foreground: ForegroundScheduler,
    stop: threading.Event,
    count: int,
    in_background: bool,
) -> Iterator[Exported]:
    ready: list[tuple[BlockKind, Callable[[], bytes]]] = []
    for kind in kinds:
        try:  # the tracing is the child's, on the CPU: of a GPU it cannot even ask the number
            with foreground.turn(_PREPARE_S, stop=stop) as granted:
                if stop.is_set() or not granted:
                    return
                ready.append((kind, kind.prepare_export(torch.device("cpu"))))
        except OneDiffError as exc:
            yield Exported(kind, None, exc)
        except Exception as exc:
            yield Exported(kind, None, _failed(exc))
    shares = [ready[i::count] for i in range(count) if ready[i::count]]
    children: list[_Child] = []
    giving_way = GivingWay()
    try:
        while (shares or children) and not stop.is_set():
            while shares:
                with foreground.turn(_FORK_PAUSE_S, stop=stop) as granted:
                    if stop.is_set() or not granted:
                        return
                    try:
                        children.append(_Child(shares[0], in_background))
                    except OSError as exc:  # no memory for a copy of this process
                        if children:
                            break  # when one of them has ended, there may be
                        reason = NoMemoryError(f"This process cannot be forked ({exc.strerror}).")
                        for kind, _ in shares[0]:
                            yield Exported(kind, None, reason)
                del shares[0]
            for child in children:
                giving_way.tell(child.pid, in_background and foreground.is_drawing)
            readable, _, _ = select.select([c.pipe for c in children], [], [], _POLL_S)
            for child in list(children):
                if child.pipe in readable:
                    yield from child.read()
                if child.finished or child.is_silent():
                    yield from child.give_up()
                    children.remove(child)
    finally:
        for child in children:
            child.kill()


class _Child:
    """A forked copy of this process that exports its share and ends."""

    def __init__(
        self, share: list[tuple[BlockKind, Callable[[], bytes]]], in_background: bool
    ) -> None:
        self._left = dict(enumerate(kind for kind, _ in share))
        self.pid = self._fork(share, in_background)

    def _fork(self, share: list[tuple[BlockKind, Callable[[], bytes]]], in_background: bool) -> int:
        """Returns the child's process id.

        Raises:
            OSError: There is no room for it.
        """
        self.pipe, theirs = os.pipe()
        self.finished = False
        self._unread = b""
        self._heard_at = time.monotonic()
        start = time.monotonic()
        try:
            with TORCH_LOCK, warnings.catch_warnings():
                # Python 3.12 warns of a fork beside threads: see the module's docstring.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError:
            os.close(self.pipe)
            os.close(theirs)
            raise
        if pid == 0:
            _serve([export for _, export in share], theirs, in_background)
        logger.debug("Forked in %.3f s", time.monotonic() - start)
        os.close(theirs)
        return pid

    def read(self) -> Iterator[Exported]:
        """Take what the child has written; may block until a message is whole."""
        chunk = os.read(self.pipe, 1 << 20)
        self._heard_at = time.monotonic()
        if not chunk:
            self.finished = True
            return
        self._unread += chunk
        while len(self._unread) >= _HEAD.size:
            index, length = _HEAD.unpack_from(self._unread)
            end = _HEAD.size + length
            if len(self._unread) < end:
                return
            program, message = pickle.loads(self._unread[_HEAD.size : end])
            self._unread = self._unread[end:]
            error = ExportError(message) if program is None else None
            yield Exported(self._left.pop(index), program, error)

    def is_silent(self) -> bool:
        """Whether it has said nothing for too long."""
        return time.monotonic() - self._heard_at > CHILD_TIMEOUT_S

    def give_up(self) -> Iterator[Exported]:
        """End the child, and say what it left undone."""
        self.kill()
        for kind in self._left.values():
            yield Exported(kind, None, WorkerLostError("The process that exports died or hung."))

    def kill(self) -> None:
        """End the child at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self.pipe)


def _serve(exports: Sequence[Callable[[], bytes]], pipe: int, in_background: bool) -> NoReturn:
    """Live and end as the child: no handler, lock or exit function of the parent's runs here."""
    try:
        _leave_the_parent(in_background)
        for index, export in enumerate(exports):
            try:
                answer: tuple[bytes | None, str] = export(), ""
            except ExportError as exc:
                answer = None, exc.message
            message = pickle.dumps(answer)
            _write_all(pipe, _HEAD.pack(index, len(message)) + message)
    finally:
        os._exit(0)


def _leave_the_parent(in_background: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # Ctrl-C is the parent's affair
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if in_background:
        step_back(in_background)
    torch.set_num_threads(1)  # the parent's threads do not exist here


def _write_all(pipe: int, message: bytes) -> None:
    view = memoryview(message)
    while view:
        view = view[os.write(pipe, view) :]

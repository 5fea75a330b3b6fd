"""A forked child that exports kinds, so that the drawing process stays undisturbed.

The child has the host's classes as they are now, including the patches of other extensions. It
cannot reach the GPU, so it traces as if on the CPU, with what autocast does on a GPU written out;
the worker puts the program on the GPU.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from onediff_ext.building.export_result import ExportResult
from onediff_ext.building.forked_process import end, fork, leave_the_parent
from onediff_ext.core.errors import ExportError, WorkerLostError
from onediff_ext.engine.blocks.block_kind import BlockKind

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<IQ")  # index of the kind, length of the message in bytes
# A child without any sign of life for so long hangs.
CHILD_TIMEOUT_S = 120.0


class ForkedExporter:
    """A forked copy of this process that exports its share and ends.

    Args:
        share: The kinds, each with the function that exports it.
        in_background: At a low priority.

    Attributes:
        pid: Process id of the child.
        pipe: Descriptor that the child's messages are read from.
        finished: Whether the child has closed its end of the pipe.

    Raises:
        OSError: There is no memory for a child.
    """

    def __init__(
        self, share: list[tuple[BlockKind, Callable[[], bytes]]], in_background: bool
    ) -> None:
        self._left = dict(enumerate(kind for kind, _ in share))
        self.pid = self._fork(share, in_background)

    def _fork(self, share: list[tuple[BlockKind, Callable[[], bytes]]], in_background: bool) -> int:
        self.pipe, theirs = os.pipe()
        self.finished = False
        self._unread = b""
        self._heard_at = time.monotonic()
        start = time.monotonic()
        try:
            pid = fork()
        except OSError:
            os.close(self.pipe)
            os.close(theirs)
            raise
        if pid == 0:
            _serve([export for _, export in share], theirs, in_background)
        logger.debug("Forked in %.3f s", time.monotonic() - start)
        os.close(theirs)
        return pid

    def read(self) -> Iterator[ExportResult]:
        """Take what the child has written, and yield each message that is complete."""
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
            yield ExportResult(self._left.pop(index), program, error)

    def is_silent(self, pace: float = 1.0) -> bool:
        """Whether the child has sent nothing for `CHILD_TIMEOUT_S`.

        Args:
            pace: Share of full speed that pictures leave to the child.
        """
        return (time.monotonic() - self._heard_at) * pace > CHILD_TIMEOUT_S

    def end_and_report(self) -> Iterator[ExportResult]:
        """End the child, and yield an error for each kind that it has not exported."""
        self.kill()
        for kind in self._left.values():
            yield ExportResult(
                kind, None, WorkerLostError("The process that exports died or hung.")
            )

    def kill(self) -> None:
        """End the child at once."""
        end(self.pid)
        os.close(self.pipe)


def _serve(exports: Sequence[Callable[[], bytes]], pipe: int, in_background: bool) -> NoReturn:
    """Run as the child, and exit without the parent's handlers and exit functions."""
    try:
        leave_the_parent(in_background)
        for index, export in enumerate(exports):
            try:
                answer: tuple[bytes | None, str] = export(), ""
            except ExportError as exc:
                answer = None, exc.message
            message = pickle.dumps(answer)
            _write_all(pipe, _HEAD.pack(index, len(message)) + message)
    finally:
        os._exit(0)


def _write_all(pipe: int, message: bytes) -> None:
    view = memoryview(message)
    while view:
        view = view[os.write(pipe, view) :]

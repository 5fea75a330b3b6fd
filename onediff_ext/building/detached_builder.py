"""A forked process that waits, and builds what is missing after the end of this one.

A script of one picture ends before a worker has begun. Python forks no process at its end (3.12),
so the fork comes before, as soon as the first picture has ended. The forked process sleeps until
this one ends. It exports the kinds without a graph then, and leaves the programs to workers.

It cannot outlive this process otherwise: the system kills it with the thread that forked it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.build_folder import BuildFolder, safe_parent
from onediff_ext.building.forked_process import die_with_parent, end, fork, leave_the_parent
from onediff_ext.building.inherited_files import let_go_of_inherited
from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.priority import give_memory_first, lower_priority
from onediff_ext.engine.blocks.block_kind import BlockKind

_READY = b"."
# The alarm ends a process that waits for a lock which another thread held at the fork.
_EXPORT_TIMEOUT_S = 120


@dataclass(frozen=True)
class _Wanted:
    kind: BlockKind
    store_request: Mapping[str, object]
    blocks: Sequence[nn.Module]  # which the threads that are gone after a fork may have held


class DetachedBuilder:
    """A forked copy of this process, which builds kinds when this one has ended.

    The calling thread must live until `take_over` or `dismiss`.

    Args:
        context: The store, and how graphs are built.
        kinds: Without a graph, those first whose graph saves most time.
        workers: How many may build then, at least 1; see `workers_after_exit`.

    Raises:
        OSError: There is no memory for another process.
    """

    def __init__(self, context: BuildContext, kinds: Sequence[BlockKind], workers: int) -> None:
        # All that asks the GPU comes before the fork.
        wanted = [_Wanted(kind, context.store_request(kind), list(kind.blocks)) for kind in kinds]
        self._ours, theirs = socket.socketpair()
        try:
            self._pid = fork()
        except OSError:
            self._ours.close()
            theirs.close()
            raise
        if self._pid == 0:
            self._ours.close()
            _serve(context, wanted, workers, theirs)
        theirs.close()

    def take_over(self, without: Collection[KindKey], timeout_s: float = 3.0) -> bool:
        """Let the forked process build now, after this one.

        Args:
            without: Kinds that others build.
            timeout_s: How long to wait for an answer.

        Returns:
            Whether it has answered. It is ended otherwise.
        """
        digests = json.dumps([key.digest for key in without])
        try:
            self._ours.settimeout(timeout_s)
            self._ours.sendall(digests.encode())
            self._ours.shutdown(socket.SHUT_WR)
            has_answered = self._ours.recv(1) == _READY
        except OSError:
            has_answered = False
        if not has_answered:
            self.dismiss()
        return has_answered

    def dismiss(self) -> None:
        """End the forked process at once."""
        end(self._pid)
        self._ours.close()


def _serve(
    context: BuildContext, wanted: Sequence[_Wanted], workers: int, parent: socket.socket
) -> NoReturn:
    """Run as the forked process, and exit without the parent's handlers and exit functions."""
    try:
        leave_the_parent(in_background=False)  # at the parent's end it answers at once
        give_memory_first()
        let_go_of_inherited(keep=parent.fileno())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        heard = b""
        while part := parent.recv(1 << 16):
            heard += part
        without = set(json.loads(heard))  # fails when the parent has closed its end in silence
        die_with_parent(False)
        parent.sendall(_READY)
        parent.close()
        lower_priority(in_background=True)
        _build(context, [each for each in wanted if each.kind.key.digest not in without], workers)
    finally:
        os._exit(0)


def _build(context: BuildContext, wanted: Sequence[_Wanted], workers: int) -> None:
    context.library.folder.prepare()
    tasks: list[tuple[bytes, Mapping[str, object]]] = []
    for each in wanted:
        signal.alarm(_EXPORT_TIMEOUT_S)
        if context.library.get(each.kind.key) is not None:
            continue
        with contextlib.suppress(Exception):  # nobody is left to tell; the next process tries again
            tasks.append((each.kind.prepare_export(torch.device("cpu"))(), each.store_request))
    if not tasks:
        return
    folder = BuildFolder(safe_parent(context.library.folder))
    device = str(wanted[0].kind.device)
    for share in (tasks[i::workers] for i in range(min(workers, len(tasks)))):
        with contextlib.suppress(OneDiffError, OSError):
            context.new_worker(folder.path, in_background=True).build_alone(share, device)
    folder.leave()

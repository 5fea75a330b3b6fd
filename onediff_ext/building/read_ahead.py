"""Loads the graphs that a checkpoint or a pipeline used last time, in a thread, before they are
needed."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.torch_lock import TORCH_LOCK
from onediff_ext.core.errors import BackendError, StoreError
from onediff_ext.core.forks import forgets_threads, fork_safe_condition
from onediff_ext.core.garbage_collection import without_collection
from onediff_ext.core.priority import quick_switches
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import StoredGraph

logger = logging.getLogger(__name__)

_WAIT_S = 10.0
_END_S = 2.0  # an import or the load of one graph takes a second at most
_all: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


@dataclass(frozen=True)
class _Request:
    """The arguments of `ReadAhead.start`."""

    digests: Callable[[], Sequence[str]]
    device: torch.device
    patience_s: float
    expected_s: float


class ReadAhead:
    """Loads graphs before the first block asks for them.

    It loads only graphs that have passed their load check on this machine.

    A picture that begins meanwhile waits for its graphs, or is drawn eager where the wait costs
    more than they save (`defer`). Loading pauses while that picture is drawn: both compute in
    Python, one at a time.

    Args:
        context: The stored graphs, and the backend that loads them.
        key_entries: Returns the entries of a key that depend on machine and backend.

    Attributes:
        load_s: How long it took to load the graphs, in seconds without a pause; None until they
            are loaded.
    """

    def __init__(
        self, context: BuildContext, key_entries: Callable[[torch.device], Mapping[str, str]]
    ) -> None:
        self._context, self._key_entries = context, key_entries
        self._changed = fork_safe_condition()
        self._coming: set[str] = set()
        self._graphs: dict[str, Graph] = {}
        self._thread: threading.Thread | None = None
        self._device: torch.device | None = None
        self.load_s: float | None = None
        self._began_at = self._expected_s = 0.0
        self._patience_s = math.inf
        self._is_deferred: bool | None = None  # None until the first kind is asked for
        self._is_paused, self._paused_s = False, 0.0
        self._deferred: list[BlockKind] = []
        self._stop = threading.Event()
        self._is_busy = False
        self._next: _Request | None = None  # asked for while others are being loaded
        _all.add(self)
        forgets_threads(self)

    def forget_other_threads(self) -> None:
        """Nothing is being loaded in this forked process."""
        is_over, self._stop = self._stop.is_set(), threading.Event()
        if is_over:
            self._stop.set()
        self._thread = self._next = None
        self._is_busy = self._is_paused = False
        self._coming.clear()
        deferred, self._deferred, self._is_deferred = self._deferred, [], False
        for kind in deferred:
            kind.miss("its stored graph was not loaded")  # a build run looks at it

    @property
    def is_reading(self) -> bool:
        """Whether graphs are being loaded."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(
        self,
        digests: Callable[[], Sequence[str]],
        device: torch.device,
        *,
        patience_s: float = math.inf,
        expected_s: float = 0.0,
    ) -> None:
        """Load the graphs that were used last time.

        While others are being loaded, the graph in work is loaded first. The rest is left unless it
        is among the new ones.

        Args:
            digests: Returns those of their kinds, the first ones to be needed first. Called in the
                thread, and may raise `StoreError`.
            device: The device that the models will be on.
            patience_s: How long a picture may wait for them: the seconds that they are likely to
                save in this process.
            expected_s: Estimate of how long they take to load, in seconds.
        """
        request = _Request(digests, device, patience_s, expected_s)
        with self._changed:
            if self._stop.is_set():
                return
            if self._is_busy:
                self._next = request
                self._end_pause()
                return
            self._is_busy = True
            self._begin(request)
            self._thread = threading.Thread(
                target=self._read, args=(request,), name="onediff-read", daemon=True
            )
            self._thread.start()

    def add(self, digests: Sequence[str], device: torch.device) -> None:
        """Load graphs that have come into the store since, in the calling thread.

        Args:
            digests: Of their kinds.
            device: As for `start`, which was called before; another device's graphs are not loaded.
        """
        self.wait()
        with self._changed:
            if not _is_same(device, self._device):
                return
            self._coming |= set(digests)
        with quick_switches(), without_collection():
            self._read_each(digests, device)

    def begin_picture(self, patience_s: float, expected_s: float) -> None:
        """Decide at the begin of a picture whether it waits for its graphs, before `defer` does.

        A host may load its model then, which takes Python too. Where the picture is drawn eager,
        loading pauses until `end_picture`. It goes on beside the pictures after that.

        Args:
            patience_s, expected_s: As for `start`.
        """
        with self._changed:
            if self._is_deferred is not None:
                self._end_pause()
            elif self._is_busy:
                self._patience_s, self._expected_s = patience_s, expected_s
                self._decide(is_coming=True)

    def end_picture(self) -> None:
        """Go on after a picture that `begin_picture` has begun."""
        self._end_pause()

    def defer(self, kind: BlockKind) -> bool:
        """Have a graph come into use after the present picture, if a wait for it does not pay.

        The first kind that is asked for decides for all of them, so that one picture is not drawn
        with those that happen to be loaded.

        Args:
            kind: A kind without a graph.

        Returns:
            Whether the kind's blocks run eager meanwhile. Otherwise `take` has its graph, if any.
        """
        digest = kind.key.digest
        with self._changed:
            if not _is_same(kind.device, self._device):
                return False
            if digest not in self._coming and digest not in self._graphs:
                return False
            if self._is_deferred is None and self._decide(bool(self._coming)):
                self._context.foreground.between_pictures(self._end_pause)
            if self._is_deferred:
                self._deferred.append(kind)
                kind.is_coming, kind.reason = True, "its stored graph is being loaded"
            return bool(self._is_deferred)

    def take(self, digest: str, device: torch.device) -> Graph | None:
        """Hand over a graph, once; waits up to 10 s for one that is about to be loaded.

        Args:
            digest: Of the kind's key.
            device: The device that the kind's blocks are on.

        Returns:
            The graph, or None when it was not loaded for this device.
        """
        with self._changed:
            if not _is_same(device, self._device):
                return None
            self._changed.wait_for(lambda: digest not in self._coming, _WAIT_S)
            return self._graphs.pop(digest, None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all graphs are loaded, or for `timeout_s`. Ends a pause."""
        self._end_pause()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def cancel(self) -> None:
        """End the thread after the graph in work, without waiting; later starts do nothing."""
        self._stop.set()
        self._end_pause()
        with self._changed:
            self._graphs.clear()

    def stop(self) -> None:
        """End the thread after the graph in work, and wait for that; later starts do nothing.

        A thread that goes on while the interpreter ends crashes in a library's code.
        """
        self._stop.set()
        self.wait(_END_S)

    def _begin(self, request: _Request) -> None:
        if not _is_same(request.device, self._device):
            self._graphs.clear()
        self._device, self._is_deferred = request.device, None
        self._patience_s, self._expected_s = request.patience_s, request.expected_s
        self._began_at, self._paused_s = time.monotonic(), 0.0

    def _decide(self, is_coming: bool) -> bool:
        left_s = self._began_at + self._expected_s - time.monotonic()
        self._is_deferred = self._is_paused = is_coming and left_s > self._patience_s
        return self._is_deferred

    def _read(self, request: _Request) -> None:
        following: _Request | None = request
        try:
            with quick_switches(), without_collection():
                while following is not None:
                    self._read_all(following.digests, following.device)
                    following = self._following()
        except BaseException:
            self._is_busy = False
            raise

    def _following(self) -> _Request | None:
        """Begin with what was asked for meanwhile; None if there is nothing."""
        with self._changed:
            following, self._next = self._next, None
            if following is None or self._stop.is_set():
                self._is_busy = False
                return None
            self._begin(following)
            return following

    def _read_all(self, digests: Callable[[], Sequence[str]], device: torch.device) -> None:
        try:
            found = digests()
        except StoreError as exc:
            logger.info("No graphs are read ahead: %s", exc)
            found = ()
        with self._changed:
            # Others are of a checkpoint that drew no picture.
            self._graphs = {each: self._graphs[each] for each in found if each in self._graphs}
            found = [each for each in found if each not in self._graphs]
            self._coming = set(found)
        try:
            steps = self._context.backend.loading_steps(device)
            # With an empty store, the first picture would only be slowed down: `GraphLoader` takes
            # the same steps later, in turns that pictures allow.
            entries = self._context.library.entries() if steps else ()
            if any(self._fits(stored, device) for stored in entries):
                self._prepare(steps)
        finally:
            self._read_each(found, device)
            if self._next is None and found:
                self.load_s = time.monotonic() - self._began_at - self._paused_s

    def _prepare(self, steps: Sequence[Callable[[], object]]) -> None:
        for step in steps:
            if not self._goes_on():
                break
            with TORCH_LOCK:  # a fork in the middle of an import would never end
                step()

    def _read_each(self, digests: Sequence[str], device: torch.device) -> None:
        try:
            for digest in digests:
                if not self._goes_on():
                    break
                self._read_one(digest, device)
        finally:
            with self._changed:
                self._coming.clear()
                self._changed.notify_all()
            self._context.foreground.between_pictures(self._use_deferred)

    def _goes_on(self) -> bool:
        """Wait for the end of a pause; then return whether there is more to load."""
        with self._changed:
            began_at = time.monotonic()
            self._changed.wait_for(lambda: not self._is_paused or self._stop.is_set())
            self._paused_s += time.monotonic() - began_at
        return not self._stop.is_set() and self._next is None

    def _end_pause(self) -> None:
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def _use_deferred(self) -> None:
        with self._changed:
            deferred, self._deferred, self._is_deferred = self._deferred, [], False
            found = [(kind, self._graphs.pop(kind.key.digest, None)) for kind in deferred]
        for kind, graph in found:
            if graph is None:
                kind.miss("its stored graph was not loaded")  # a build run looks at it
            else:
                kind.accept(graph, "loaded")
                self._context.event_log.note("loaded", kind.label, "read ahead")

    def _read_one(self, digest: str, device: torch.device) -> None:
        graph = None
        try:
            stored = self._context.library.find(digest)
            if stored is not None and stored.payload and self._fits(stored, device):
                graph = self._context.load(stored.payload, device)
        except BackendError as exc:
            logger.info("%s was not read ahead: %s", digest[:12], exc)  # said again when needed
        finally:
            with self._changed:
                self._coming.discard(digest)
                if graph is not None:
                    self._graphs[digest] = graph
                self._changed.notify_all()

    def _fits(self, stored: StoredGraph, device: torch.device) -> bool:
        """Whether a graph fits machine and backend, and has passed its load check here."""
        entries = stored.key.entries
        fits = all(entries.get(name) == value for name, value in self._key_entries(device).items())
        return fits and bool(
            self._context.graph_trust.is_load_safe_on(stored, machine_digest(device))
        )


def _is_same(device: torch.device, other: torch.device | None) -> bool:
    """Whether both name the same device; a GPU without an index is the first one."""
    return (
        other is not None
        and device.type == other.type
        and (device.index or 0) == (other.index or 0)
    )


@atexit.register
def _stop_all() -> None:
    for read_ahead in list(_all):
        read_ahead.stop()

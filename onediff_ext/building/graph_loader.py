"""Loads new graphs and takes them into use where that delays pictures least."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from onediff_ext.building.build_share import BuildShare
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.building.torch_lock import TORCH_LOCK
from onediff_ext.core.forks import fork_safe_lock
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.blocks.block_kind import BlockKind

_STEP_S = 0.2
_FIRST_LOAD_S = 0.05
# The first loads also import modules. Later loads must not wait for turns of that length.
_LONG_LOAD_S = 0.15
# On a GPU several graphs are used at a time, those that come within so long.
_USE_TOGETHER_S = 5.0


class GraphLoader:
    """Loads graphs when the foreground allows it, and uses them from a next picture on.

    Args:
        backend: The backend of the graphs.
        foreground: Grants turns, and knows when a picture is drawn.
        load: Makes a graph's bytes callable on a device.
        share: What loads may take from pictures.
    """

    def __init__(
        self,
        backend: Backend,
        foreground: ForegroundScheduler,
        load: Callable[[bytes, torch.device], Graph],
        share: BuildShare,
    ) -> None:
        self._backend, self._foreground, self._load = backend, foreground, load
        self._share = share
        self._load_s = _FIRST_LOAD_S
        self._ready: list[tuple[BlockKind, Graph, str]] = []
        self._lock = fork_safe_lock()
        self._first_ready_at = 0.0
        self._steps: dict[torch.device, deque[Callable[[], object]]] = {}  # not done yet

    def prepare(self, device: torch.device, stop: threading.Event) -> None:
        """Do once what the first load on a device needs, in turns that the foreground allows.

        Args:
            device: The device.
            stop: Ends the wait for a turn when set; the rest is done later.
        """
        if device not in self._steps:
            self._steps[device] = deque(self._backend.loading_steps(device))
        steps = self._steps[device]
        while steps:
            share = self._share.of_turns(device)
            with self._foreground.turn(_STEP_S, stop=stop, share=share) as granted:
                if not granted:
                    return
                with TORCH_LOCK:  # a fork in the middle of an import would never end
                    steps.popleft()()

    def take(
        self,
        kind: BlockKind,
        payload: bytes,
        source: str,
        *,
        in_background: bool,
        stop: threading.Event,
    ) -> bool:
        """Load a graph; use it at once, or in the background from a next picture on.

        Args:
            kind: The kind that the graph is for.
            payload: The graph's bytes.
            source: ``"built"`` or ``"loaded"``, as in `BlockKind.source`.
            in_background: Wait for a turn of the foreground.
            stop: Ends that wait when set.

        Returns:
            False when `stop` was set before there was a turn.

        Raises:
            BackendError: It cannot be loaded.
        """
        if not in_background:
            kind.accept(self._load(payload, kind.device), source)
            return True
        self.prepare(kind.device, stop)
        share = self._share.of_turns(kind.device)
        with self._foreground.turn(self._load_s, stop=stop, share=share) as granted:
            if not granted:
                return False
            start = time.monotonic()
            graph = self._load(payload, kind.device)
            self._load_s = min(_LONG_LOAD_S, time.monotonic() - start)
        kind.is_coming = True
        with self._lock:
            if not self._ready:
                self._first_ready_at = time.monotonic()
            self._ready.append((kind, graph, source))
        if kind.device.type == "cpu":
            self.use_ready()
        return True

    def use_due(self) -> None:
        """Use the loaded graphs from the next picture on, if the first of them has waited enough.

        Each change costs pictures on a GPU a comparison with eager and new CUDA graphs, some 0.4 s.
        """
        if self._ready and time.monotonic() - self._first_ready_at >= _USE_TOGETHER_S:
            self.use_ready()

    def use_ready(self) -> None:
        """Use the loaded graphs from the next picture on."""
        with self._lock:
            ready, self._ready = self._ready, []

        def accept() -> None:
            for kind, graph, source in ready:
                kind.accept(graph, source)

        if ready:
            self._foreground.between_pictures(accept)

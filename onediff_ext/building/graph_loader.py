"""Takes new graphs into use where that costs pictures least."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.blocks.block_kind import BlockKind

_PREPARE_S = 0.4
_FIRST_LOAD_S = 0.05
# The first loads take modules in with them: the rest must not wait for so long a turn.
_LONG_LOAD_S = 0.15
_USE_EVERY_S = 5.0


class GraphLoader:
    """Loads graphs in turns of the gate, and uses them from a next picture on.

    Args:
        backend: Whose graphs these are.
        foreground: Knows when a picture is drawn.
        load: Makes a graph's bytes callable.
    """

    def __init__(
        self,
        backend: Backend,
        foreground: ForegroundScheduler,
        load: Callable[[bytes, torch.device], Graph],
    ) -> None:
        self._backend, self._gate, self._load = backend, foreground, load
        self._load_s = _FIRST_LOAD_S
        self._ready: list[tuple[BlockKind, Graph, str]] = []
        self._lock = threading.Lock()
        self._used_at = 0.0
        self._prepared: set[torch.device] = set()

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

        Returns:
            False when `stop` was set before there was a turn.

        Raises:
            BackendError: It cannot be loaded.
        """
        if not in_background:
            kind.accept(self._load(payload, kind.device), source)
            return True
        self._prepare(kind.device)
        with self._gate.turn(self._load_s, stop=stop) as granted:
            if not granted:
                return False
            start = time.monotonic()
            graph = self._load(payload, kind.device)
            self._load_s = min(_LONG_LOAD_S, time.monotonic() - start)
        kind.is_coming = True
        with self._lock:
            self._ready.append((kind, graph, source))
            waited_s = time.monotonic() - self._used_at
        # On a GPU several at a time: each change there costs the picture after it a comparison
        # and new captures, some 0.4 s.
        if kind.device.type == "cpu" or waited_s >= _USE_EVERY_S:
            self.use_ready()
        return True

    def use_ready(self) -> None:
        """Use what is loaded, from the next picture on."""
        with self._lock:
            ready, self._ready = self._ready, []
            self._used_at = time.monotonic()

        def accept() -> None:
            for kind, graph, source in ready:
                kind.accept(graph, source)

        if ready:
            self._gate.between_pictures(accept)

    def _prepare(self, device: torch.device) -> None:
        if device not in self._prepared:
            self._prepared.add(device)
            with self._gate.turn(_PREPARE_S):
                self._backend.prepare_to_load(device)

"""The one owner of state: the kinds of this process, their graphs, and what happened to them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from onediff_ext.backends.registry import choose_backend
from onediff_ext.core.errors import BackendError
from onediff_ext.core.keys import KindKey
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.capture.captures import Captures
from onediff_ext.engine.capture.recorder import CudaRecorder
from onediff_ext.engine.families.base import BlockFamily
from onediff_ext.engine.kinds import Kind, KindState
from onediff_ext.engine.machine import machine_entries
from onediff_ext.engine.runner import Kinds
from onediff_ext.engine.structure import WrapperRule
from onediff_ext.service.builder import Builder, ProgressListener
from onediff_ext.store import GraphLibrary, default_root

logger = logging.getLogger(__name__)

# Raised whenever the way from a block to its program changes, since old graphs are then
# those of another function.
ENGINE_SCHEMA = "1"


@dataclass(frozen=True)
class Fallback:
    """Calls that ran eager although a graph was wanted.

    Args:
        what: The kind or class of block.
        reason: Why, in plain words.
        count: How many calls.
    """

    what: str
    reason: str
    count: int


class Session(Kinds):
    """Kinds and graphs of one process, shared by all the pipes that it compiles.

    Args:
        options: What the user chose.
        families: The block classes that the host's models consist of.
        rules: Wrappers (LoRA layers) that the host puts around a block's layers.
    """

    def __init__(
        self,
        options: CompileOptions,
        families: Sequence[BlockFamily],
        rules: Sequence[WrapperRule] = (),
    ) -> None:
        self.options, self.families, self.rules = options, families, tuple(rules)
        self.backend, substituted = choose_backend(options.backend)
        root = options.store if options.store is not None else default_root()
        self.library = GraphLibrary(root, options.store_limit_bytes)
        self.builder = Builder(self.library, self.backend, options.workers, options.build_timeout_s)
        self.captures = Captures(
            CudaRecorder(),
            options.capture_limit if options.captures and self.backend.capturable else 0,
            options.capture_limit_bytes,
        )
        self.listener: ProgressListener | None = None
        self._kinds: dict[str, Kind] = {}
        self._fallbacks: Counter[tuple[str, str]] = Counter()
        self._lock = threading.RLock()
        self._holding = 0
        self._entries: dict[torch.device, dict[str, str]] = {}
        if substituted is not None:
            self.fell_back(f"the {options.backend} backend", substituted)
            logger.warning("%s", substituted)

    def key_entries(self, device: torch.device) -> dict[str, str]:
        if device not in self._entries:
            self._entries[device] = {
                "engine": ENGINE_SCHEMA,
                **machine_entries(device.type, device.index or 0),
                **self.backend.key_entries(device),
            }
        return self._entries[device]

    def find(self, key: KindKey, make: Callable[[], Kind]) -> Kind:
        with self._lock:
            kind = self._kinds.get(key.digest)
            if kind is None:
                kind = make()
                self._kinds[key.digest] = kind
                self._load(kind)
            return kind

    def fell_back(self, what: str, reason: str) -> None:
        self._fallbacks[what, reason] += 1

    @property
    def kinds(self) -> list[Kind]:
        """All kinds that were met, in the order of their first call."""
        return list(self._kinds.values())

    def missing(self) -> list[Kind]:
        """Kinds without a graph that could have one, most called first."""
        missing = [kind for kind in self.kinds if kind.state is KindState.MISSING]
        return sorted(missing, key=lambda kind: -kind.calls)

    @contextmanager
    def holding_builds(self) -> Iterator[None]:
        """Only find kinds for the length of a ``with`` block; then build all of them together."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1
        self.after_forward()

    def after_forward(self) -> None:
        """Build what a forward found missing, unless the user or a holder does not want it now."""
        if self.options.build == "wait" and not self._holding:
            self.build_missing()

    def build_missing(self) -> None:
        """Build what is missing and wait for it; what fails runs eager, with its reason."""
        missing = self.missing()
        if missing:
            self.builder.build(missing, self.listener)

    def load_missing(self) -> None:
        """Look again for graphs that have come into the store since, by an import for instance."""
        for kind in self.missing():
            self._load(kind)

    def fallbacks(self) -> list[Fallback]:
        """Calls that ran eager and why, most frequent first."""
        return [Fallback(*key, count) for key, count in self._fallbacks.most_common()]

    def count(self, source: str) -> int:
        """How many kinds got their graph in this process by being ``"built"`` or ``"loaded"``."""
        return sum(kind.source == source for kind in self.kinds)

    def _load(self, kind: Kind) -> None:
        reason = self.backend.unavailable_reason(kind.device)
        if reason is not None:
            kind.fail(reason)
            return
        stored = self.library.get(kind.key)
        if stored is None or stored.payload is None:
            logger.info(
                "No graph of %s: %s", kind.label, self.library.explain(kind.key, kind.label)
            )
            return
        try:
            kind.accept(self.backend.load(stored.payload, kind.device), "loaded")
        except BackendError as exc:
            logger.warning("%s is built again: %s", kind.label, exc)

"""Reads the graphs of a checkpoint in a thread while its weights are still being loaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

import torch

from onediff_ext.building.builder import Builder
from onediff_ext.core.errors import BackendError, StoreError
from onediff_ext.core.garbage_collection import without_collection
from onediff_ext.core.priority import quick_switches
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import CheckpointRecords, StoredGraph

logger = logging.getLogger(__name__)

_WAIT_S = 10.0


class ReadAhead:
    """Graphs that are loaded before the first block asks for them.

    Only graphs that are known to be harmless on this machine are loaded.

    Args:
        builder: Loads.
        key_entries: The parts of a key that machine and backend give.
    """

    def __init__(
        self, builder: Builder, key_entries: Callable[[torch.device], Mapping[str, str]]
    ) -> None:
        self._builder, self._key_entries = builder, key_entries
        self._changed = threading.Condition()
        self._coming: set[str] = set()
        self._graphs: dict[str, Graph] = {}
        self._thread: threading.Thread | None = None
        self._device: torch.device | None = None

    @property
    def is_reading(self) -> bool:
        """Whether the thread is at work."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(self, content_hash: str, device: torch.device) -> None:
        """Read what a checkpoint used last time; does nothing while another one is read."""
        with self._changed:
            if self.is_reading:
                return
            self._graphs.clear()  # of a checkpoint that was never drawn with
            self._device = device
            self._thread = threading.Thread(
                target=self._read, args=(content_hash, device), name="onediff-read", daemon=True
            )
            self._thread.start()

    def take(self, digest: str, device: torch.device) -> Graph | None:
        """Hand over a kind's graph for a device, waiting for it if it is about to be there; else
        None."""
        with self._changed:
            if not _is_same(device, self._device):
                return None
            self._changed.wait_for(lambda: digest not in self._coming, _WAIT_S)
            return self._graphs.pop(digest, None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all is read."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _read(self, content_hash: str, device: torch.device) -> None:
        with quick_switches(), without_collection():
            self._read_all(content_hash, device)

    def _read_all(self, content_hash: str, device: torch.device) -> None:
        library = self._builder.library
        self._builder.backend.prepare_to_load(device)
        try:
            record = CheckpointRecords(library.folder).read(content_hash)
        except StoreError as exc:
            logger.info("Nothing is read ahead: %s", exc)
            return
        if record is None:
            return
        digests = sorted(record.kinds, key=lambda digest: -record.kinds[digest].block_count)
        with self._changed:
            self._coming = set(digests)
        try:
            for digest in digests:
                self._read_one(digest, device)
        finally:
            with self._changed:
                self._coming.clear()
                self._changed.notify_all()

    def _read_one(self, digest: str, device: torch.device) -> None:
        graph = None
        try:
            stored = self._builder.library.find(digest)
            if stored is not None and stored.payload and self._fits(stored, device):
                graph = self._builder.load_bytes(stored.payload, device)
        except BackendError as exc:
            logger.info("%s was not read ahead: %s", digest[:12], exc)  # said again when needed
        finally:
            with self._changed:
                self._coming.discard(digest)
                if graph is not None:
                    self._graphs[digest] = graph
                self._changed.notify_all()

    def _fits(self, stored: StoredGraph, device: torch.device) -> bool:
        """Whether a graph was made for what this process is, and is known to be harmless."""
        entries = stored.key.entries
        fits = all(entries.get(name) == value for name, value in self._key_entries(device).items())
        return fits and bool(self._builder.is_load_safe_on(stored, machine_digest(device)))


def _is_same(device: torch.device, other: torch.device | None) -> bool:
    """Whether both name one device; a GPU without a number is the first one."""
    return (
        other is not None
        and device.type == other.type
        and (device.index or 0) == (other.index or 0)
    )

"""The state that all parts of building share: store, backend, foreground and build records."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from onediff_ext.building.build_outcomes import BuildOutcomes
from onediff_ext.building.build_share import BuildShare
from onediff_ext.building.event_log import EventLog
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.building.graph_loader import GraphLoader
from onediff_ext.building.graph_trust import GraphTrust
from onediff_ext.building.shared_graphs import SharedGraphs
from onediff_ext.building.torch_lock import TORCH_LOCK
from onediff_ext.building.worker.store_alone import STORE_ALONE
from onediff_ext.building.worker_process import Built, WorkerProcess
from onediff_ext.core.errors import StoreError
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import BuildHistory, BuildRecords, GraphLibrary

logger = logging.getLogger(__name__)


class BuildContext:
    """The surroundings of all builds of one session.

    Args:
        library: The stored graphs.
        backend: Builds and loads graphs.
        options: Workers, time limits, attempts.
        event_log: Where every step is logged with its reason.
        foreground: Knows when a picture is drawn; graphs change between pictures only.

    Attributes:
        build_records: Failures and load checks that later processes must know.
        history: Build times and measured steps of this machine.
        graph_trust: Decides which stored graphs may be loaded.
        outcomes: Records how builds end.
        graph_loader: Takes new graphs into use.
        share: What builds may take from pictures.
        shared: The graphs of other machines; None without any (`share_graphs`).
        export_children: Forked exporters, as in `exporting.export_all`; None fits the system.
    """

    def __init__(
        self,
        library: GraphLibrary,
        backend: Backend,
        options: CompileOptions,
        event_log: EventLog | None = None,
        foreground: ForegroundScheduler | None = None,
    ) -> None:
        self.library, self.backend, self.options = library, backend, options
        self.event_log = event_log or EventLog()
        self.foreground = foreground or ForegroundScheduler()
        self.build_records = BuildRecords(library.folder)
        self.history = BuildHistory(library.folder)
        self.graph_trust = GraphTrust(library, self.build_records, self.event_log)
        self.outcomes = BuildOutcomes(
            library,
            backend.name,
            self.build_records,
            self.history,
            self.graph_trust,
            self.event_log,
        )
        self.share = BuildShare(self.foreground)
        self.graph_loader = GraphLoader(backend, self.foreground, self.load, self.share)
        self.export_children: int | None = None
        self.shared: SharedGraphs | None = None

    @property
    def may_build(self) -> bool:
        """Whether new graphs may be built. Stored graphs get their load check in any case."""
        return self.options.build != "never"

    def load(self, payload: bytes, device: torch.device) -> Graph:
        """Make a graph's bytes callable in this process.

        Args:
            payload: The bytes; their load check must have passed.
            device: The device that the graph runs on.

        Raises:
            BackendError: They cannot be loaded.
        """
        with TORCH_LOCK:
            return self.backend.load(payload, device)

    def share_graphs(self, shared: SharedGraphs) -> None:
        """Share graphs with other machines from now on."""
        self.shared, self.outcomes.on_stored = shared, shared.publish

    @contextmanager
    def build_lock(self, kind: BlockKind, timeout_s: float) -> Iterator[None]:
        """The build lock of a kind; no lock where the store cannot be written.

        Where graphs are shared, a graph that another machine has built is stored on entering.

        Raises:
            StoreBusyError: On entering, when another process holds it for over `timeout_s`, or
                another machine builds the kind.
        """
        try:
            self.library.folder.prepare()
        except StoreError as exc:
            self.outcomes.warn(exc)
            yield
            return
        with self.library.build_lock(kind.key, timeout_s):
            if self.shared is None or not self.may_build or self.graph_trust.usable_graph(kind):
                yield
                return
            with self.shared.claim(kind.key.digest):
                yield

    def sweep(self) -> None:
        """Delete what killed processes have left in the store."""
        try:
            self.library.sweep()
        except StoreError as exc:
            logger.debug("The store was not swept: %s", exc)  # the next stored graph warns of it

    def new_worker(self, folder: Path, in_background: bool) -> WorkerProcess:
        """Return a worker that is not started yet.

        Args:
            folder: For the compilers' own caches.
            in_background: At a low priority.
        """
        pace = self.share.pace if in_background else None
        try:
            self.library.folder.prepare()
            compiler_files = self.library.folder.compiler_files
        except StoreError:  # the next stored graph warns of it
            compiler_files = None
        return WorkerProcess(self.backend.name, folder, in_background, pace, compiler_files)

    def store_request(self, kind: BlockKind) -> dict[str, object]:
        """What a worker needs to store a kind's new graph without this process."""
        return {
            "task": STORE_ALONE,
            "store": str(self.library.folder.root.absolute()),
            "limit_bytes": self.library.limit_bytes,
            "key": dict(kind.key.entries),
            "label": kind.label,
            "backend": self.backend.name,
            "machine": machine_digest(kind.device),
            "timeout_s": self.options.build_timeout_s,
        }

    def build_in(self, worker: WorkerProcess, program: bytes, device: str) -> Built:
        """Build one exported program in one worker; see `WorkerProcess.build`."""
        return worker.build(program, device, self.options.build_timeout_s)

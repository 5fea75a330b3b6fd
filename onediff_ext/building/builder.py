"""Builds missing kinds in several worker processes and puts them into the store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from onediff_ext import __version__
from onediff_ext.building.event_log import EventLog
from onediff_ext.building.exporting import TORCH_LOCK
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.building.graph_loader import GraphLoader
from onediff_ext.building.worker_process import Built, WorkerProcess
from onediff_ext.core.errors import (
    BackendError,
    BlockGoneError,
    ExportError,
    MachineError,
    OneDiffError,
    StoreError,
)
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.priority import usable_cores
from onediff_ext.core.words import day_of
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import BuildHistory, BuildRecords, GraphLibrary, StoredGraph

if TYPE_CHECKING:
    from onediff_ext.building.build_run import BuildRun

logger = logging.getLogger(__name__)

# A worker's CUDA context, its kernels and its trial; small GPUs would have no room for many.
_WORKER_GPU_BYTES = 2**30
# After a full disk or a missing compiler: how long until builds are tried again.
RETRY_AFTER_S = 60.0


@dataclass(frozen=True)
class BuildProgress:
    """How far a build has come.

    Args:
        done: Kinds finished, failed ones among them.
        needed: Kinds of this build.
        label: What was finished last.
        seconds_left: From the history of this machine, or else from the builds so far.
    """

    done: int
    needed: int
    label: str
    seconds_left: float


ProgressListener = Callable[[BuildProgress], None]


def worker_count(options: CompileOptions) -> int:
    """Workers at the same time while nobody draws."""
    return options.workers or min(8, max(2, usable_cores() // 2))


class Builder:
    """Builds kinds, each by exactly one of the processes that share a store.

    Args:
        library: Where graphs are looked for and put.
        backend: Who builds and loads them.
        options: Workers, time limits, attempts.
        event_log: Told what happens and why.
        foreground: Knows when a picture is drawn; graphs change between pictures only.

    Attributes:
        warnings: Why graphs are not kept, each reason once.
        problem: Why nothing can be built now (full disk, no compiler), or ``""``.
        retry_at: When that may be over; monotonic.
        run: What is being built now, or None.
        export_children: See `export_all`; None is what suits the system.
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
        self.event_log, self.foreground = (
            event_log or EventLog(),
            foreground or ForegroundScheduler(),
        )
        self.build_records, self.history = (
            BuildRecords(library.folder),
            BuildHistory(library.folder),
        )
        self.warnings: list[str] = []
        self.problem, self.retry_at = "", 0.0
        self._refused: dict[str, str] = {}
        self._doubted: dict[str, str] = {}
        self.export_children: int | None = None
        self.run: BuildRun | None = None
        self._running = threading.Lock()
        self.graph_loader = GraphLoader(backend, self.foreground, self.load_bytes)

    @property
    def worker_count(self) -> int:
        """Workers at the same time while nobody draws."""
        return worker_count(self.options)

    @property
    def may_build(self) -> bool:
        """Whether new graphs may be made; stored ones are proved in any case."""
        return self.options.build != "never"

    def workers_beside(self, device: torch.device, is_drawing: bool, running: int = 0) -> int:
        """Workers at the same time beside a picture that may need the same cores and memory.

        Args:
            device: What they build for.
            is_drawing: Whether a picture is being drawn.
            running: How many are at work, and have their memory already.
        """
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return max(1, min(self.worker_count, running + free // _WORKER_GPU_BYTES))
        return 1 if is_drawing and not self.options.workers else self.worker_count

    def build(
        self,
        kinds: Sequence[BlockKind],
        listen: ProgressListener | None = None,
        *,
        stop: threading.Event | None = None,
        in_background: bool = False,
        more: Callable[[], Sequence[BlockKind]] | None = None,
    ) -> None:
        """Build each kind, or load it if another process was faster; raises for none of them.

        A kind that cannot be built is marked as failed, with the reason. When the machine is at
        fault and the kinds are not, they stay missing, and `problem` says why.

        Args:
            kinds: The most useful first.
            listen: Told after each kind.
            stop: Ends everything at once when set; what was being built is lost.
            in_background: Somebody draws meanwhile: lowest priority, graphs change between
                pictures. Otherwise the caller waits, and they change at once.
            more: Asked for further kinds while there is time.
        """
        from onediff_ext.building.build_run import BuildRun

        self.problem = ""
        with self._running:
            self.sweep()
            try:
                run = BuildRun(self, kinds, listen, stop or threading.Event(), in_background)
            except BackendError as exc:
                self.hold(exc, kinds)
                return
            with run:
                self.run = run
                try:
                    run.work(more or (lambda: ()))
                except (OSError, MemoryError, RuntimeError) as exc:  # no room for a thread, say
                    logger.exception("Builds ended")
                    self.hold(MachineError(f"Builds ended: {exc}"))
                finally:
                    self.run = None
                    self.graph_loader.use_ready()

    def hold(self, exc: BackendError, kinds: Sequence[BlockKind] = ()) -> None:
        """Nothing can be built here now: kinds stay missing, and are tried later."""
        self.problem, self.retry_at = str(exc), time.monotonic() + RETRY_AFTER_S
        self.event_log.note("failed", "all builds", str(exc), level=logging.WARNING)
        for kind in kinds:
            if kind.state is KindState.MISSING:
                kind.reason = f"could not be built: {exc.message}"

    def sweep(self) -> None:
        """Delete what killed processes have left in the store."""
        try:
            self.library.sweep()
        except StoreError as exc:
            logger.debug("The store was not swept: %s", exc)  # said when a graph is to be kept

    def lock(self, kind: BlockKind, timeout_s: float) -> AbstractContextManager[None]:
        """The kind's build lock; no lock at all where the store cannot be written."""
        try:
            self.library.folder.prepare()
        except StoreError as exc:
            self.warn(exc)
            return nullcontext()
        return self.library.build_lock(kind.key, timeout_s)

    def known_failure(self, kind: BlockKind) -> str | None:
        """Why an earlier process could not build a kind; None when it may be tried."""
        failure = self.build_records.failure(kind.key.digest, __version__)
        if failure is None:
            return None
        return f"given up on {day_of(failure.at)}: {failure.reason}"

    def is_load_safe(self, stored: StoredGraph, kind: BlockKind) -> bool | None:
        """Whether a stored graph may be loaded here; None when that is not known yet."""
        return self.is_load_safe_on(stored, machine_digest(kind.device))

    def is_load_safe_on(self, stored: StoredGraph, machine: str) -> bool | None:
        """The same for a machine of which `machine_digest` is known."""
        proof = self.build_records.proof(stored.digest, machine, stored.header.payload_sha256)
        return None if proof is None else not proof.problem

    def stored(self, kind: BlockKind) -> StoredGraph | None:
        """The stored graph of a kind, unless it is known to be bad on this machine."""
        stored = self.library.get(kind.key)
        if stored is None or stored.payload is None or self.is_load_safe(stored, kind) is False:
            return None
        if self._refused.get(kind.key.digest) == stored.header.payload_sha256:
            return None
        return stored

    def refuse(self, kind: BlockKind, payload_sha256: str, problem: str) -> None:
        """Do not load these bytes in this process again. It may be to blame: nothing is kept."""
        self.event_log.note("bad", kind.label, f"the stored graph {problem}", level=logging.WARNING)
        self._refused[kind.key.digest] = payload_sha256

    def doubt(self, kind: BlockKind, reason: str) -> bool:
        """Have a stored graph tried in a process of its own before it is used again: it was wrong
        beside eager in this process, where somebody may have patched what eager runs.

        Returns:
            Whether there is one, and it was not doubted before.
        """
        stored = self.stored(kind)
        if stored is None or self._doubted.get(kind.key.digest) == stored.header.payload_sha256:
            return False
        self._doubted[kind.key.digest] = stored.header.payload_sha256
        kind.miss(f"its stored graph {reason}")
        return True

    def leave_eager(self, kind: BlockKind) -> None:
        """A graph that was doubted turned out right in a process of its own."""
        kind.fail(f"{kind.reason}, but is right in a process of its own: something changes it here")
        self.event_log.note("failed", kind.label, kind.reason, level=logging.WARNING)

    def trust_again(self) -> None:
        """Forget what was refused or doubted in this process."""
        self._refused.clear()
        self._doubted.clear()

    def is_doubted(self, stored: StoredGraph) -> bool:
        """Whether these bytes were wrong in this process."""
        return self._doubted.get(stored.digest) == stored.header.payload_sha256

    def why_missing(self, kind: BlockKind) -> str:
        """Why a kind has no graph that may be used here, in plain words."""
        proof = self.build_records.read(kind.key.digest).proofs.get(machine_digest(kind.device))
        reason = self.library.explain(kind.key, kind.label)
        if reason == "stored":
            if proof is not None and proof.problem:
                return f"the stored one is bad on this machine: {proof.problem}"
            return "the stored one was never loaded on this machine"
        return reason

    def load(self, payload: bytes, kind: BlockKind) -> Graph:
        """Make a graph's bytes callable, in this process.

        Raises:
            BackendError: They cannot be loaded.
        """
        return self.load_bytes(payload, kind.device)

    def load_bytes(self, payload: bytes, device: torch.device) -> Graph:
        """The same without its kind.

        Raises:
            BackendError: They cannot be loaded.
        """
        with TORCH_LOCK:
            return self.backend.load(payload, device)

    def keep(self, kind: BlockKind, payload: bytes, seconds: float) -> None:
        """Put a new graph on disk, if that is possible, with what its build took."""
        machine = machine_digest(kind.device)
        try:
            stored = self.library.put(
                kind.key,
                payload,
                label=kind.label,
                backend=self.backend.name,
                build_seconds=seconds,
                details={},
            )
        except StoreError as exc:
            self.warn(exc)  # the graph serves this process all the same
        else:
            for known in (self._refused, self._doubted):  # made again, and tried
                known.pop(kind.key.digest, None)
            # Its worker has tried it. A graph file may claim that of itself, and is not believed.
            self.build_records.record_load_check(
                stored.digest,
                kind.label,
                machine=machine,
                payload_sha256=stored.header.payload_sha256,
            )
        if seconds:
            self.history.record_build(machine, kind.label, seconds)

    def give_up(self, kind: BlockKind, exc: OneDiffError, *, attempts: int, lasting: bool) -> None:
        """Run a kind eager from now on; with `lasting`, in later processes too.

        Only what a worker process has found twice may last: it knows the program and nothing of
        what was patched, or went wrong, in this process.
        """
        kind.fail(f"could not be built: {exc.message}")
        self.event_log.note("failed", kind.label, kind.reason, level=logging.WARNING)
        if lasting:
            self.remember_failure(kind, exc.message, attempts)

    def put_off(self, kind: BlockKind, exc: OneDiffError) -> None:
        """Try a kind again when it is met again: what failed may be somebody else's doing.

        One that itself cannot be exported is given up, for this process, after some tries.
        """
        reason = f"could not be built: {exc.message}"
        is_its_own = isinstance(exc, ExportError) and not isinstance(exc, BlockGoneError)
        if is_its_own and kind.tries + 1 >= self.options.build_attempts:
            self.give_up(kind, exc, attempts=kind.tries + 1, lasting=False)
            return
        kind.put_off(reason, self.foreground.epoch)
        self.event_log.note("put off", kind.label, exc.message)

    def remember_failure(self, kind: BlockKind, reason: str, attempts: int = 1) -> None:
        """Let no later process try a kind again, until somebody asks or the version changes."""
        self.build_records.record_failure(
            kind.key.digest, kind.label, reason, attempts=attempts, version=__version__
        )

    def mark_bad(self, kind: BlockKind, payload_sha256: str, problem: str) -> None:
        """Never load these bytes on this machine again."""
        self.event_log.note("bad", kind.label, f"the stored graph {problem}", level=logging.WARNING)
        self.build_records.record_load_check(
            kind.key.digest,
            kind.label,
            machine=machine_digest(kind.device),
            payload_sha256=payload_sha256,
            problem=problem,
        )

    def warn(self, exc: StoreError) -> None:
        """Say once that graphs are not kept, and why."""
        text = f"Graphs are not kept: {exc}"
        if text not in self.warnings:
            self.warnings.append(text)
            logger.warning("%s", text)

    def new_worker(self, cache: Path, in_background: bool) -> WorkerProcess:
        """A worker that is not started yet."""
        return WorkerProcess(self.backend.name, cache, in_background)

    def build_in(self, worker: WorkerProcess, program: bytes, device: str) -> Built:
        """Build one program in one worker; see `WorkerProcess.build`."""
        return worker.build(program, device, self.options.build_timeout_s)

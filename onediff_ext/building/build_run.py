"""One wave of builds: its locks, its workers, its order, what it does when something fails."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from onediff_ext.building.build_jobs import Answer, Job, Loaded, WorkerPool, seconds_of
from onediff_ext.building.builder import Builder, BuildProgress, ProgressListener
from onediff_ext.building.exporting import Exported, export_all
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.core.errors import (
    BackendError,
    MachineError,
    NoMemoryError,
    OneDiffError,
    WorkerKilledError,
    WorkerLostError,
)
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import StoreBusyError, StoredGraph

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_LOOK_AGAIN_S = 1.0  # at the kinds that another process builds
_PROOF = 2  # worker processes that fail over a program before it is to blame


class BuildRun:
    """One call of `Builder.build`.

    Raises:
        BackendError: There is no place to build in.
    """

    def __init__(
        self,
        builder: Builder,
        kinds: Sequence[BlockKind],
        listen: ProgressListener | None,
        stop: threading.Event,
        in_background: bool,
    ) -> None:
        self._builder, self._listen, self._stop = builder, listen, stop
        self._in_background = in_background
        self._new = list(kinds)
        self._elsewhere: list[BlockKind] = []
        self._exporting: dict[int, Job] = {}
        self._waiting: list[Job] = []
        self._working: list[Job] = []
        self._loading: list[Job] = []
        self._seen = {id(kind) for kind in kinds}
        self._done = 0
        self._spent: list[float] = []
        self._one_at_a_time = False
        self._most_workers = builder.worker_count
        self._events: queue.SimpleQueue[Exported | Answer | Loaded] = queue.SimpleQueue()
        self._exporter: threading.Thread | None = None
        self._halt = threading.Event()  # for the exporter: stop, or leaving by an error
        self.workers = WorkerPool(builder, in_background, self._events.put)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="onediff-load")
        self._machine_at_fault: MachineError | None = None

    def __enter__(self) -> BuildRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._halt.set()
        self.workers.stop()  # an interrupted build ends at once
        self._loader.shutdown(cancel_futures=True)
        if self._exporter is not None:
            self._exporter.join()
        unfinished = (*self._exporting.values(), *self._waiting, *self._working, *self._loading)
        for job in unfinished:
            job.locks.close()
        self.workers.remove()

    @property
    def stage(self) -> str:
        """What is done now, as in `Status.stage`."""
        if self._working:
            return "proving" if all(job.unproved for job in self._working) else "building"
        return "exporting" if self._exporting else "building"

    @property
    def building_now(self) -> tuple[str, ...]:
        """Labels of the kinds in the workers' hands."""
        return tuple(job.kind.label for job in list(self._working))

    def seconds_left(self) -> float | None:
        """Until everything is built, from this machine's history; None when nothing is known."""
        running = list(self._working)
        jobs = [*running, *list(self._waiting), *list(self._exporting.values())]
        if not jobs:
            return 0.0
        machine = machine_digest(jobs[0].kind.device)
        expected = self._builder.history.build_seconds(machine, [job.kind.label for job in jobs])
        total = seconds_of(jobs, running, expected, self._spent)
        return None if total is None else total / max(1, min(len(jobs), self._limit()))

    def work(self, more: Callable[[], Sequence[BlockKind]]) -> None:
        """Build everything; returns early when stopped or when nothing can be built here."""
        look_at = time.monotonic() + self._builder.options.build_timeout_s
        while not self._stop.is_set():
            self._claim_new(lock_timeout_s=0)
            self._start_export()
            self._dispatch()
            if self._machine_at_fault is not None:
                self._blame_the_machine(self._machine_at_fault)
                return
            if self._exporting or self._waiting or self._working or self._loading:
                self._handle_events()
                self._add(more())
                continue
            self._add(more())
            if self._new:
                continue
            if not self._elsewhere:
                return
            # Another process is building these: take over when it has, or has died.
            again, self._elsewhere = self._elsewhere, []
            self._new = again
            late = time.monotonic() > look_at
            self._claim_new(lock_timeout_s=0 if not late else 1)
            if self._elsewhere and late:
                for kind in self._elsewhere:
                    busy = BackendError("Another process has been building it for too long.")
                    self._put_off(kind, busy)
                self._elsewhere = []
            if self._elsewhere:
                self._stop.wait(_LOOK_AGAIN_S)

    def _add(self, kinds: Sequence[BlockKind]) -> None:
        for kind in kinds:
            if id(kind) not in self._seen:
                self._seen.add(id(kind))
                self._new.append(kind)

    def _claim_new(self, lock_timeout_s: float) -> None:
        new, self._new = self._new, []
        for kind in new:
            if self._stop.is_set():
                return
            try:
                self._claim(kind, lock_timeout_s)
            except StoreBusyError:
                self._elsewhere.append(kind)
            except OneDiffError as exc:
                self._put_off(kind, exc)

    def _claim(self, kind: BlockKind, lock_timeout_s: float) -> None:
        builder = self._builder
        with ExitStack() as locks:
            locks.enter_context(builder.lock(kind, lock_timeout_s))
            failure = builder.known_failure(kind)
            if failure is not None:
                kind.fail(failure)
                builder.event_log.note("failed", kind.label, failure)
                self._finished(kind)
                return
            reason = builder.why_missing(kind)
            stored = builder.stored(kind)
            if stored is not None and stored.payload is not None:
                if builder.is_load_safe(stored, kind) and not builder.is_doubted(stored):
                    job = Job(kind, locks.pop_all(), reason=reason)
                    self._start_load(job, stored, "loaded", "another process built it")
                    return
            elif not builder.may_build:
                kind.fail(reason)
                self._finished(kind)
                return
            job = Job(kind, locks.pop_all(), unproved=stored, reason=reason)
            self._exporting[id(kind)] = job
            builder.event_log.note("build" if stored is None else "prove", kind.label, reason)

    def _start_export(self) -> None:
        if self._exporter is not None and self._exporter.is_alive():
            return
        kinds = [job.kind for job in self._exporting.values() if not job.program]
        if not kinds:
            return
        kinds.sort(key=lambda kind: -kind.weight)
        exporter = threading.Thread(
            target=self._export, args=(kinds,), name="onediff-export", daemon=True
        )
        try:
            exporter.start()
        except RuntimeError as exc:
            self._machine_at_fault = NoMemoryError(f"Blocks cannot be exported ({exc}).")
            return
        self._exporter = exporter

    def _export(self, kinds: list[BlockKind]) -> None:
        builder = self._builder
        foreground = builder.foreground if self._in_background else ForegroundScheduler()
        try:
            for exported in export_all(
                kinds,
                foreground,
                self._halt,
                children=builder.export_children,
                in_background=self._in_background,
            ):
                self._events.put(exported)
        except Exception as exc:  # this thread's errors would be lost otherwise
            logger.exception("Exports ended")
            lost = WorkerLostError(f"Exports ended: {exc}")
            for kind in kinds:
                self._events.put(Exported(kind, None, lost))

    def _limit(self) -> int:
        return max(1, min(self._most_workers, self._allowed()))

    def _allowed(self) -> int:
        if self._one_at_a_time:
            return 1
        jobs = self._working or self._waiting or list(self._exporting.values())
        if not jobs:
            return self._builder.worker_count
        drawing = self._in_background and self._builder.foreground.is_drawing
        return self._builder.workers_beside(jobs[0].kind.device, drawing, len(self._working))

    def _dispatch(self) -> None:
        while self._waiting and len(self._working) < self._limit():
            if self._stop.is_set():
                return
            # What was never lost goes first; of these, what saves most.
            job = min(self._waiting, key=lambda job: (job.attempts, -job.kind.weight))
            self._waiting.remove(job)
            job.started_at = time.monotonic()
            self._working.append(job)
            self.workers.submit(job)

    def _handle_events(self) -> None:
        self.workers.give_way(self._in_background and self._builder.foreground.is_drawing)
        try:
            event = self._events.get(timeout=_POLL_S)
        except queue.Empty:
            return
        if isinstance(event, Exported):
            self._exported(event)
            return
        if isinstance(event, Loaded):
            self._loaded(event)
            return
        job = event.job
        self._working.remove(job)
        if self._stop.is_set():
            job.locks.close()
        elif isinstance(event.error, MachineError):
            self._waiting.append(job)
            if isinstance(event.error, NoMemoryError) and self._working:
                # With those that it has room for: what they build is done the sooner.
                self._most_workers = len(self._working)
                builder = self._builder
                builder.event_log.note("retried", job.kind.label, event.error.message)
            else:
                self._machine_at_fault = event.error
        elif job.unproved is not None:
            self._proved(job, job.unproved, event.error)
        else:
            self._built(job, event)

    def _exported(self, exported: Exported) -> None:
        job = self._exporting.pop(id(exported.kind), None)
        if job is None:
            return
        if exported.program is not None:
            job.program = exported.program
            self._waiting.append(job)
            return
        error = exported.error or BackendError("It was not exported.")
        if isinstance(error, MachineError):
            self._exporting[id(job.kind)] = job
            self._machine_at_fault = error
            return
        with job.locks:
            self._put_off(job.kind, error)

    def _built(self, job: Job, answer: Answer) -> None:
        builder = self._builder
        if answer.error is not None or answer.payload is None:
            error = answer.error or BackendError("The worker gave no graph.")
            if not self._tries_again(job, error):
                with job.locks:
                    lasting = job.faults >= _PROOF
                    self._fail(job.kind, error, attempts=job.attempts, lasting=lasting)
            return
        builder.keep(job.kind, answer.payload, answer.seconds)
        self._spent.append(answer.seconds)
        job.news = ("built", f"in {answer.seconds:.1f} s: {job.reason}")
        self._loading.append(job)
        self._loader.submit(self._load, job, answer.payload, "built")

    def _start_load(self, job: Job, stored: StoredGraph, what: str, reason: str) -> None:
        """Have a stored graph loaded that is known to be harmless."""
        job.unproved, job.news = stored, (what, reason)
        self._loading.append(job)
        self._loader.submit(self._load, job, stored.payload or b"", "loaded")

    def _load(self, job: Job, payload: bytes, source: str) -> None:
        done, error = False, None
        try:
            background = self._in_background
            done = self._builder.graph_loader.take(
                job.kind, payload, source, in_background=background, stop=self._halt
            )
        except BackendError as exc:
            error = exc
        except Exception as exc:  # would be lost in the pool, and the run would wait for ever
            error = BackendError(f"{type(exc).__name__}: {exc}")
        self._events.put(Loaded(job, done, error))

    def _loaded(self, event: Loaded) -> None:
        job, error = event.job, event.error
        self._loading.remove(job)
        if error is not None and job.unproved is not None:
            # In this process, which says nothing about another one.
            problem, digest = f"cannot be loaded: {error.message}", job.unproved.header
            self._builder.refuse(job.kind, digest.payload_sha256, problem)
            self._build_another(job, problem)
            return
        with job.locks:
            if error is not None:
                self._fail(job.kind, error, attempts=job.attempts + 1, lasting=False)
            elif event.done:
                what, reason = job.news
                self._builder.event_log.note(what, job.kind.label, reason)
                self._finished(job.kind)

    def _tries_again(self, job: Job, error: OneDiffError) -> bool:
        """Whether a job goes to another worker process: what failed once may be the machine's
        doing. A lost worker's runs alone, since memory may have been short."""
        builder = self._builder
        job.attempts += 1
        job.faults += not isinstance(error, WorkerKilledError)
        lost = isinstance(error, WorkerLostError)
        if job.attempts >= builder.options.build_attempts or not (lost or job.faults < _PROOF):
            return False
        self._one_at_a_time = self._one_at_a_time or lost
        builder.event_log.note("retried", job.kind.label, error.message, level=logging.WARNING)
        self._waiting.append(job)
        return True

    def _proved(self, job: Job, stored: StoredGraph, error: OneDiffError | None) -> None:
        builder = self._builder
        if error is not None:
            if self._tries_again(job, error):
                return
            if job.faults >= _PROOF:
                builder.mark_bad(job.kind, stored.header.payload_sha256, error.message)
            else:
                builder.refuse(job.kind, stored.header.payload_sha256, error.message)
            self._build_another(job, error.message)
            return
        if builder.is_doubted(stored):
            with job.locks:
                builder.leave_eager(job.kind)
                self._finished(job.kind)
            return
        builder.build_records.record_load_check(
            stored.digest,
            job.kind.label,
            machine=machine_digest(job.kind.device),
            payload_sha256=stored.header.payload_sha256,
        )
        self._start_load(job, stored, "proved", "loads and gives eager's results here")

    def _build_another(self, job: Job, problem: str) -> None:
        """The stored graph cannot be used; build one in its place."""
        builder = self._builder
        reason = f"the stored one is bad here: {problem}"
        if not builder.may_build:
            job.locks.close()
            job.kind.fail(reason)
            self._finished(job.kind)
            return
        job.unproved, job.reason, job.attempts, job.faults = None, reason, 0, 0
        if job.program:
            self._waiting.append(job)
        else:
            self._exporting[id(job.kind)] = job

    def _blame_the_machine(self, error: MachineError) -> None:
        """Nothing can be built here now: the kinds stay missing, and are tried later."""
        builder = self._builder
        if self._stop.is_set():
            return
        left = [*self._waiting, *self._working, *self._loading, *self._exporting.values()]
        builder.hold(error, [*(job.kind for job in left), *self._elsewhere, *self._new])

    def _put_off(self, kind: BlockKind, exc: OneDiffError) -> None:
        self._builder.put_off(kind, exc)
        self._finished(kind)

    def _fail(self, kind: BlockKind, exc: OneDiffError, *, attempts: int, lasting: bool) -> None:
        self._builder.give_up(kind, exc, attempts=attempts, lasting=lasting)
        self._finished(kind)

    def _finished(self, kind: BlockKind) -> None:
        self._done += 1
        if self._listen is not None:
            needed = len(self._seen)
            left = self.seconds_left() or 0.0
            self._listen(BuildProgress(self._done, needed, kind.label, left))

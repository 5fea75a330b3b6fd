"""One build run: claims kinds, exports them, has workers build or check graphs, and loads these."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.build_jobs import Job, JobQueues
from onediff_ext.building.build_progress import (
    BuildProgress,
    ProgressListener,
    first_graph_seconds,
    remaining_seconds,
)
from onediff_ext.building.build_times import BuildTimes
from onediff_ext.building.export_result import ExportResult
from onediff_ext.building.export_thread import ExportThread
from onediff_ext.building.kind_claim import claim_kind
from onediff_ext.building.load_thread import LoadResult, LoadThread
from onediff_ext.building.worker_counts import worker_count, workers_beside_foreground
from onediff_ext.building.worker_failures import WorkerFailures
from onediff_ext.building.worker_pool import WorkerPool, WorkerResult
from onediff_ext.core.errors import BackendError, MachineError, OneDiffError
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import StoreBusyError, StoredGraph

_POLL_S = 0.1
_LOOK_AGAIN_S = 1.0  # between two looks at the kinds that another process builds


class BuildRun:
    """One call of `Builder.build`. The calling thread handles all results; see `work`.

    Args:
        context: The store, the backend, and what is known of builds.
        kinds: The most useful first.
        listen: Called after each kind, or None.
        stop: Ends everything at once when set.
        in_background: Pictures are drawn meanwhile.

    Attributes:
        jobs: What each unfinished kind waits for.
        times: Of the builds of this run.
        workers: The worker processes.

    Raises:
        BackendError: There is no safe folder to build in.
    """

    def __init__(
        self,
        context: BuildContext,
        kinds: Sequence[BlockKind],
        listen: ProgressListener | None,
        stop: threading.Event,
        in_background: bool,
    ) -> None:
        self._context, self._listen, self._stop = context, listen, stop
        context.share.begin()
        self._in_background = in_background
        self.jobs = JobQueues(kinds)
        self._done = 0
        self.times = BuildTimes()
        options = context.options
        self._failures = WorkerFailures(
            options.build_attempts, worker_count(options), context.event_log
        )
        self._machine_error: MachineError | None = None
        self._is_prepared = False
        self._results: queue.SimpleQueue[ExportResult | WorkerResult | LoadResult] = (
            queue.SimpleQueue()
        )
        self._halt = threading.Event()  # for the threads: stopped, or ended by an error
        report = self._results.put
        self.workers = WorkerPool(context, in_background, report)
        self._exporter = ExportThread(context, in_background, report, self._halt)
        self._loader = LoadThread(context.graph_loader, in_background, report, self._halt)

    def __enter__(self) -> BuildRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._halt.set()
        self.workers.stop()  # an interrupted build ends at once
        self._loader.stop()
        self._note_unfinished_loads()
        self._exporter.join()
        for job in self.jobs.unfinished:
            job.locks.close()
        self.workers.remove()

    def hand_over(self) -> list[BlockKind]:
        """Let workers finish what they build, since this process ends; return these kinds."""
        return self.workers.hand_over()

    @property
    def stage(self) -> str:
        """The present stage, as in `Status.stage`; ``"proving"`` is a load check."""
        jobs = self.jobs
        if jobs.working:
            return "proving" if all(job.stored for job in jobs.working) else "building"
        return "exporting" if jobs.exporting else "building"

    @property
    def building_now(self) -> tuple[str, ...]:
        """Labels of the kinds that are in a worker."""
        return tuple(job.kind.label for job in list(self.jobs.working))

    def seconds_left(self) -> float | None:
        """Estimate the time until everything is built; None when there is no history."""
        running = list(self.jobs.working)
        kinds = [*(job.kind for job in running), *self.jobs.kinds_before_workers]
        if not kinds:
            return 0.0
        device = kinds[0].device
        expected_s = self._context.history.build_seconds(
            machine_digest(device), self._context.backend.name, [kind.label for kind in kinds]
        )
        pace = self._pace(device)
        total_s = remaining_seconds(running, expected_s, self.times.own_s, pace)
        return None if total_s is None else total_s / max(1, min(len(kinds), self._worker_limit()))

    def first_graph_s(self) -> float | None:
        """The time that the first graph takes on other machines; None once one is there."""
        kinds = [*(job.kind for job in self.jobs.working), *self.jobs.kinds_before_workers]
        if not kinds or self.times.own_s:
            return None
        name = self._context.backend.name
        return first_graph_seconds(name, kinds[0].device.type, self.times.spent_s)

    def _pace(self, device: torch.device) -> float:
        return self.times.pace(self._context.share.pace(device) if self._in_background else 1.0)

    def work(self, more: Callable[[], Sequence[BlockKind]]) -> None:
        """Build everything; return early when stopped, or when nothing can be built here.

        Args:
            more: Asked for further kinds while the run goes on.
        """
        jobs = self.jobs
        patience_ends_at = time.monotonic() + self._context.options.build_timeout_s
        while not self._stop.is_set():
            self._claim_new(lock_timeout_s=0)
            self._start_exports()
            self._submit_waiting()
            self._prepare_loads()
            self._context.graph_loader.use_due()
            if self._machine_error is not None:
                if not self._stop.is_set():
                    self._context.outcomes.postpone_all(self._machine_error, jobs.unfinished_kinds)
                return
            if jobs.are_busy:
                self._handle_result()
                jobs.add(more())
                continue
            jobs.add(more())
            if jobs.new:
                continue
            if not jobs.elsewhere:
                return
            self._take_over(is_late=time.monotonic() > patience_ends_at)

    def _take_over(self, is_late: bool) -> None:
        """Claim what another process was building, if it has finished or died.

        Args:
            is_late: Retry in a later picture what is being built elsewhere even now.
        """
        jobs = self.jobs
        jobs.new, jobs.elsewhere = jobs.elsewhere, []
        self._claim_new(lock_timeout_s=1 if is_late else 0)
        if jobs.elsewhere and is_late:
            for kind in jobs.elsewhere:
                self._retry_later(
                    kind, BackendError("Another process has been building it for too long.")
                )
            jobs.elsewhere = []
        if jobs.elsewhere:
            self._stop.wait(_LOOK_AGAIN_S)

    def _claim_new(self, lock_timeout_s: float) -> None:
        jobs = self.jobs
        new, jobs.new = jobs.new, []
        for kind in new:
            if self._stop.is_set():
                return
            try:
                job = claim_kind(self._context, kind, lock_timeout_s)
            except StoreBusyError:
                jobs.elsewhere.append(kind)
            except OneDiffError as exc:
                self._retry_later(kind, exc)
            else:
                if job is None:
                    self._finish(kind)
                elif job.stored is not None and job.has_passed:
                    self._load_stored(job, job.stored)
                else:
                    jobs.start_export(job)

    def _start_exports(self) -> None:
        if self._exporter.is_running:
            return
        kinds = [job.kind for job in self.jobs.exporting.values() if not job.program]
        if not kinds:
            return
        try:
            self._exporter.start(kinds)
        except MachineError as exc:
            self._machine_error = exc

    def _submit_waiting(self) -> None:
        while self.jobs.waiting and len(self.jobs.working) < self._worker_limit():
            if self._stop.is_set():
                return
            self.workers.submit(self.jobs.take_next())

    def _prepare_loads(self) -> None:
        """Prepare loads while workers build, once no process is forked for exports any more."""
        jobs = self.jobs
        if jobs.working and not jobs.exporting and not self._is_prepared:
            self._is_prepared = True
            self._loader.prepare(jobs.working[0].kind.device)

    def _worker_limit(self) -> int:
        device, options = self._device(), self._context.options
        if device is None:
            return self._failures.worker_limit(worker_count(options))
        allowed = workers_beside_foreground(
            options,
            device,
            is_drawing=self._is_beside_picture(),
            running=len(self.jobs.working),
        )
        return self._failures.worker_limit(allowed)

    def _device(self) -> torch.device | None:
        """The device of the present jobs, or None without any."""
        jobs = self.jobs
        some = jobs.working or jobs.waiting or list(jobs.exporting.values())
        return some[0].kind.device if some else None

    def _is_beside_picture(self) -> bool:
        return self._in_background and self._context.foreground.is_drawing

    def _handle_result(self) -> None:
        device = self._device()
        if device is not None:
            share = self._context.share.of_processors(device)
            self.workers.give_way(self._is_beside_picture(), share)
        try:
            result = self._results.get(timeout=_POLL_S)
        except queue.Empty:
            return
        if isinstance(result, ExportResult):
            self._handle_export(result)
        elif isinstance(result, LoadResult):
            self._handle_load(result)
        else:
            self._handle_worker(result)

    def _handle_export(self, result: ExportResult) -> None:
        job = self.jobs.take_exported(result.kind)
        if job is None:
            return
        if result.program is not None:
            job.program = result.program
            self.jobs.waiting.append(job)
            return
        error = result.error or BackendError("It was not exported.")
        if isinstance(error, MachineError):
            self.jobs.start_export(job)
            self._machine_error = error
            return
        with job.locks:
            self._retry_later(job.kind, error)

    def _handle_worker(self, result: WorkerResult) -> None:
        jobs, job = self.jobs, result.job
        jobs.working.remove(job)
        if self._stop.is_set():
            job.locks.close()
        elif isinstance(result.error, MachineError):
            jobs.waiting.append(job)
            if not self._failures.may_go_on(job, result.error, len(jobs.working)):
                self._machine_error = result.error
        elif result.error is not None and self._failures.may_retry(job, result.error):
            jobs.waiting.append(job)
        elif job.stored is not None:
            self._handle_load_check(job, job.stored, result.error)
        elif result.error is not None:
            with job.locks:
                lasting = self._failures.is_to_blame(job)
                attempts = job.failed_attempts
                self._fail(job.kind, result.error, attempts=attempts, lasting=lasting)
        else:
            self._context.outcomes.store_built_graph(job.kind, result.payload, result.seconds)
            self.times.add(result.seconds, job.started_at)
            job.event = ("built", f"in {result.seconds:.1f} s: {job.reason}")
            self._load(job, result.payload, "built")

    def _handle_load_check(self, job: Job, stored: StoredGraph, error: OneDiffError | None) -> None:
        trust = self._context.graph_trust
        if error is not None:
            payload_sha256 = stored.header.payload_sha256
            if self._failures.is_to_blame(job):
                trust.record_bad(job.kind, payload_sha256, error.message)
            else:
                trust.refuse(job.kind, payload_sha256, error.message)
            self._build_instead(job, error.message)
        elif trust.differed_here(stored):
            with job.locks:
                self._context.outcomes.fail_in_this_process(job.kind)
                self._finish(job.kind)
        else:
            trust.record_passed(job.kind, stored)
            job.event = ("load checked", "loads and gives eager's results here")
            self._load_stored(job, stored)

    def _load_stored(self, job: Job, stored: StoredGraph) -> None:
        self._load(job, stored.payload or b"", "loaded")

    def _load(self, job: Job, payload: bytes, source: str) -> None:
        self.jobs.loading.append(job)
        self._loader.submit(job, payload, source)

    def _handle_load(self, result: LoadResult) -> None:
        job, error = result.job, result.error
        self.jobs.loading.remove(job)
        if error is not None and job.stored is not None:
            # In this process; another one may load it.
            problem = f"cannot be loaded: {error.message}"
            self._context.graph_trust.refuse(job.kind, job.stored.header.payload_sha256, problem)
            self._build_instead(job, problem)
            return
        with job.locks:
            if error is not None:
                self._fail(job.kind, error, attempts=job.failed_attempts + 1, lasting=False)
            elif result.done:
                self._note_event(job)
                self._finish(job.kind)

    def _note_unfinished_loads(self) -> None:
        """Note the graphs that were built or came into use while the run was ending."""
        loaded = set()
        while not self._results.empty():
            result = self._results.get()
            if isinstance(result, LoadResult) and result.done:
                loaded.add(result.job)
        for job in self.jobs.loading:
            if job.event or job in loaded:
                self._note_event(job)

    def _note_event(self, job: Job) -> None:
        event, reason = job.event or ("loaded", "it is in the store")
        self._context.event_log.note(event, job.kind.label, reason)

    def _build_instead(self, job: Job, problem: str) -> None:
        """Build a graph in place of a stored one that cannot be used."""
        reason = f"the stored one is bad here: {problem}"
        if not self._context.may_build:
            job.locks.close()
            job.kind.fail(reason)
            self._finish(job.kind)
            return
        job.stored, job.has_passed, job.reason, job.event = None, False, reason, None
        job.failed_attempts = job.faults = 0
        if job.program:
            self.jobs.waiting.append(job)
        else:
            self.jobs.start_export(job)

    def _retry_later(self, kind: BlockKind, exc: OneDiffError) -> None:
        context = self._context
        context.outcomes.retry_later(
            kind,
            exc,
            most_attempts=context.options.build_attempts,
            epoch=context.foreground.epoch,
        )
        self._finish(kind)

    def _fail(self, kind: BlockKind, exc: OneDiffError, *, attempts: int, lasting: bool) -> None:
        self._context.outcomes.fail_kind(kind, exc, attempts=attempts, lasting=lasting)
        self._finish(kind)

    def _finish(self, kind: BlockKind) -> None:
        self._done += 1
        if self._listen is not None:
            left_s = self.seconds_left() or 0.0
            needed = self.jobs.kind_count
            self._listen(BuildProgress(self._done, needed, kind.label, left_s))

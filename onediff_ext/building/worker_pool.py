"""The worker processes of one build run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.build_folder import BuildFolder, safe_parent
from onediff_ext.building.build_jobs import Job
from onediff_ext.building.worker_counts import workers_after_exit
from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.core.errors import BackendError, NoMemoryError, OneDiffError
from onediff_ext.core.priority import SessionPriorities
from onediff_ext.engine.blocks.block_kind import BlockKind


@dataclass(frozen=True)
class WorkerResult:
    """The result of a job in its worker.

    Args:
        job: The job.
        payload: The new graph's bytes; empty for a load check or an error.
        seconds: Build time in the worker; 0 for a load check.
        error: Why there is no graph, or the stored one is bad; None for a success.
    """

    job: Job
    payload: bytes
    seconds: float
    error: OneDiffError | None


class WorkerPool:
    """Runs jobs in worker processes, which start when they are needed.

    Each job has a thread that waits for its worker. These threads are daemons, so that the end of
    the interpreter does not wait for them.

    Args:
        context: Makes the workers.
        in_background: At a low priority.
        report: Called with each result, in a thread of the pool.

    Attributes:
        folder: Where the workers put their files.

    Raises:
        BackendError: There is no safe folder to build in.
    """

    def __init__(
        self, context: BuildContext, in_background: bool, report: Callable[[WorkerResult], None]
    ) -> None:
        self._context, self._in_background, self._report = context, in_background, report
        self.folder = BuildFolder(safe_parent(context.library.folder))
        self._workers: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []
        self._giving_way = SessionPriorities()
        self._threads: list[threading.Thread] = []
        self._busy: dict[WorkerProcess, Job] = {}
        self._alone: set[WorkerProcess] = set()

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [pid for worker in list(self._workers) if (pid := worker.pid) is not None]

    def give_way(self, is_drawing: bool, share: float) -> None:
        """Leave the processors to a picture that is being drawn; use more of them in between.

        Args:
            is_drawing: Whether a picture is being drawn.
            share: As for `SessionPriorities.tell`.
        """
        for pid in self.pids:
            self._giving_way.tell(pid, is_drawing, share)

    def submit(self, job: Job) -> None:
        """Build a job's graph, or check its stored one, in an idle worker."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._run, args=(job,), name="onediff-build", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no room for another thread
            error = NoMemoryError(f"A build cannot begin ({exc}).")
            self._report(WorkerResult(job, b"", 0.0, error))
        else:
            self._threads.append(thread)

    def hand_over(self) -> list[BlockKind]:
        """Let workers that build finish and store their graphs alone, since this process ends.

        Returns:
            The kinds that they build. They do not belong to the pool any more. On a GPU, their
            memory limits their number; load checks are not handed over.
        """
        alone, kinds = self._alone, []
        for worker, job in list(self._busy.items()):
            if job.stored is not None and job.stored.payload is not None:
                continue
            if len(alone) >= workers_after_exit(job.kind.device):
                break
            alone.add(worker)
            if worker.hand_over(job.program, self._context.store_request(job.kind)):
                kinds.append(job.kind)
            else:
                alone.remove(worker)
        return kinds

    def stop(self) -> None:
        """End all workers at once."""
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.join()

    def remove(self) -> None:
        """Delete the workers' files, except for workers that go on alone."""
        if self._alone:
            self.folder.leave()
        else:
            self.folder.remove()

    def _take_worker(self) -> WorkerProcess:
        try:
            return self._idle.pop()
        except IndexError:
            worker = self._context.new_worker(self.folder.path, self._in_background)
            self._workers.append(worker)
            return worker

    def _run(self, job: Job) -> None:
        context = self._context
        payload, seconds = b"", 0.0
        error: OneDiffError | None = None
        worker: WorkerProcess | None = None
        try:
            worker = self._take_worker()
            if job.failed_attempts:
                worker.renew()
            self._busy[worker] = job
            if job.stored is not None and job.stored.payload is not None:
                timeout_s = context.options.build_timeout_s
                device = str(job.kind.device)
                worker.check_load(job.stored.payload, job.program, device, timeout_s)
            else:
                built = context.build_in(worker, job.program, str(job.kind.device))
                payload, seconds = built.payload, built.seconds
        except OneDiffError as exc:
            error = exc
        except Exception as exc:  # would be lost in the thread, and the run would wait for ever
            error = BackendError(f"{type(exc).__name__}: {exc}")
        finally:
            if worker is not None:
                self._busy.pop(worker, None)
                self._idle.append(worker)
        if worker not in self._alone:
            self._report(WorkerResult(job, payload, seconds, error))

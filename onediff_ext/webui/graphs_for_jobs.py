"""Graphs under the models of a WebUI for the length of each job, whatever the host."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions
from onediff_ext.core.forks import fork_safe_lock
from onediff_ext.core.guidance_options import ALL_STEPS, GuidanceOptions
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.status import Status
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.base import HostCheckpoint, WebUIHost
from onediff_ext.hosts.pinned_memory import PINNED_MEMORY
from onediff_ext.session.session import Session
from onediff_ext.session.sessions_by_options import SessionsByOptions
from onediff_ext.webui.attached_models import AttachedModels, use_checkpoint
from onediff_ext.webui.deepcache import DeepCacheTally
from onediff_ext.webui.eager_fallback import EagerFallback
from onediff_ext.webui.guidance import GuidanceTally
from onediff_ext.webui.job_close_hook import JobCloseHook
from onediff_ext.webui.running_jobs import RunningJob, RunningJobs


class GraphsForJobs:
    """Puts graphs under the host's models when a job starts and removes them when it ends.

    One object serves the whole process. Jobs may come from any thread; the host runs them one
    at a time, and one may run inside another (a face restorer that draws with a processing
    object of its own).

    Acceleration never raises: on any failure the picture is drawn eager, and `status` says why.
    Between jobs every attribute of the host is the host's own.

    Args:
        host: The adapter of the running WebUI.

    Attributes:
        jobs: The running jobs.
        models: The models with graphs, and those kept for later jobs.
        eager: The reasons why the current job runs eager.
        deepcache, guidance: What DeepCache and guidance steps did for the current job.
        expected: The session of a first picture that has not come yet (`expect`), or None.
    """

    def __init__(self, host: WebUIHost) -> None:
        self.host = host
        self._lock = fork_safe_lock()
        self.jobs = RunningJobs()
        self.models = AttachedModels(host, self._lock)
        self.eager = EagerFallback(self.models.detach)
        self.deepcache, self.guidance = DeepCacheTally(), GuidanceTally()
        self._sessions = SessionsByOptions(
            lambda options: Session(options, host.families(), host.rules())
        )
        self._memory = Patches()  # of the host's memory management, while jobs run
        self._running = "off"
        self._earlier_fallbacks: Counter[tuple[str, str]] = Counter()  # of the jobs before
        self._session_of_picture: Session | None = None
        self.expected: Session | None = None
        self._is_closed = False

    # ------------------------------------------------------------------ the life of a job

    def before_load(self, patience_s: float, expected_s: float) -> None:
        """Decide whether the first picture waits for graphs: called before the host loads a model.

        Args:
            patience_s: The seconds that they are likely to save in the job.
            expected_s: Estimate of how long they take to load, in seconds.
        """
        session = self.expected
        if session is not None:
            session.read_ahead.begin_picture(patience_s, expected_s)

    def begin(
        self,
        host_job: Any,
        options: CompileOptions | None,
        ignores: frozenset[str] = frozenset(),
        *,
        deepcache: DeepCacheOptions = OFF,
        guidance_steps: GuidanceOptions = ALL_STEPS,
        is_foreground: bool = True,
    ) -> None:
        """Start a job: called from the script's ``process`` hook, before anything is encoded.

        A second call for the same job replaces the first; the img2img Batch tab calls once for
        each picture. The host's ``close`` of the job calls `end`, on errors too.

        Args:
            host_job: The host's processing object ``p``.
            options: What the user chose; None runs this job without graphs.
            ignores: Components that stay eager (`onediff_ext.core.options.parse_ignores`).
            deepcache: How much of the UNet's work is reused between the job's steps.
            guidance_steps: In which of them guidance is computed.
            is_foreground: Whether a user waits for the picture. Builds give way to it, and no
                graph changes until it ends.
        """
        with self._lock:
            self._finish_ended(host_job)
            job = RunningJob(weakref.ref(host_job), options, ignores, deepcache, guidance_steps)
            self.jobs.add(job)
            if is_foreground:
                self.eager.clear()
                self.deepcache, self.guidance = DeepCacheTally(), GuidanceTally()
            else:
                self.eager.begin_warm_up()
            if not len(self._memory):
                with self.eager.on_failure():
                    self.host.share_memory(
                        self._memory, self._sessions.make_room, self._sessions.returnable_bytes
                    )
                    self.host.speed_up_moves(self._memory)
            if is_foreground:
                self._enter_foreground(job)
            with self.eager.on_failure():
                JobCloseHook.install(host_job, self.end)
                # Other extensions may patch the UNet before sampling, and would then keep our
                # runners. Only the VAE, which encodes before sampling, is attached here.
                self._attach(job, sampling=False)
            latest = self._sessions.latest
            if is_foreground or latest is not self._session_of_picture:
                self._session_of_picture = latest
                self._earlier_fallbacks = Counter() if latest is None else latest.fell_back_so_far()

    def before_sampling(self, host_job: Any) -> None:
        """Attach all models: called from ``process_before_every_sampling``, for each pass.

        The host may have loaded or patched another model since `begin`.
        """
        with self._lock:
            job = self.jobs.find(host_job)
            if job is not None:
                with self.eager.on_failure():
                    self._attach(job, sampling=True)

    def before_step(self, parameters: Any = None) -> None:
        """Follow the sampler: called from ``on_cfg_denoiser`` with that callback's argument.

        A refiner may have replaced the model.
        """
        with self._lock:
            job = self.jobs.innermost
            if self.models.attached and job is not None:
                with self.eager.on_failure():
                    self._attach(job, sampling=True)
                    if parameters is not None:
                        host_job = getattr(getattr(parameters, "denoiser", None), "p", None)
                        drawn = self.jobs.find(host_job) or job
                        self.models.begin_evaluation(
                            parameters, drawn, self.deepcache, self.guidance
                        )

    def after_sampling(self, host_job: Any) -> None:
        """End DeepCache and guidance steps, and free DeepCache's features.

        It is called from ``post_sample``, after all passes of a batch. The VAE decodes next and
        needs the memory.
        """
        with self._lock:
            if self.jobs.find(host_job) is not None:
                self.models.end_runs()

    def end(self, host_job: Any) -> None:
        """End a job: called from ``postprocess``. A second call does nothing.

        Every attribute of the host is restored, unless an outer job still runs.
        """
        with self._lock:
            self.models.end_runs()
            if not self.jobs.has_other_than(host_job):
                self.models.detach()
                self._memory.undo()
                PINNED_MEMORY.settle()
            self._finish_ended(host_job)
            if self.session is not None:
                self.session.read_ahead.end_picture()

    def model_loaded(self) -> None:
        """Forget checkpoints that are gone: called from ``on_model_loaded``."""
        with self._lock:
            self.models.drop_gone()
            self.eager.of_picture = []

    def close(self) -> None:
        """Undo everything and end builds: the extension is reloaded or disabled."""
        self.cancel_builds()
        with self._lock:
            self._is_closed = True
            for job in self.jobs:
                self._finish(job)
            self.models.close()
            self._memory.undo()
            PINNED_MEMORY.give_back()
            self._sessions.close()
            self._running = "off"

    # ------------------------------------------------------------------ for panel, API, warm-up

    @property
    def session(self) -> Session | None:
        """The session of the latest job: its block kinds, store and fallbacks."""
        return self._sessions.latest

    def status(self) -> Status:
        """The status for panel and API. Cheap; any thread may call."""
        session = self.session
        reasons = tuple(dict.fromkeys((*self.eager.reasons, *self.eager.of_picture)))
        if session is None or self._running == "off":
            return Status("eager" if reasons else self._running, reasons=reasons)
        status = session.status(since=self._earlier_fallbacks)
        return replace(
            status,
            running="eager" if reasons else status.running,
            reasons=tuple(dict.fromkeys((*reasons, *status.reasons))),
            deepcache=self.deepcache.line(),
            guidance=self.guidance.line(),
        )

    def begin_without_picture(
        self, host_job: Any, options: CompileOptions, ignores: frozenset[str]
    ) -> Session:
        """Attach all models as a job does, while graphs may still change: for a warm-up.

        Args:
            host_job: Stands for a job; `end` takes it.
            options, ignores: As in `begin`.

        Returns:
            The session that owns the graphs.
        """
        with self._lock:
            session = self._sessions.session_for(options)
            self.begin(host_job, options, ignores, is_foreground=False)
            self.before_sampling(host_job)
            return session

    def expect(
        self, options: CompileOptions, checkpoint: HostCheckpoint, device: torch.device
    ) -> None:
        """Begin to load the graphs of a checkpoint that is likely to draw the first picture.

        Does nothing after the first job, or if this machine lacks the device.

        Args:
            options: Likely ones.
            checkpoint: What the host is likely to load.
            device: Where.
        """
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            return
        session = self._sessions.open(options)  # may take a second, which no picture waits for
        with self._lock:
            if self._sessions.latest is not None or self._is_closed:
                session.close()
                return
            self._sessions.add(options, session)
            self.expected = session
            use_checkpoint(session, checkpoint, device)

    def forget_expected(self) -> None:
        """Close the session of `expect`: the first picture is drawn otherwise."""
        with self._lock:
            session, self.expected = self.expected, None
            if session is not None:
                self._sessions.remove(session)

    def cancel_builds(self) -> None:
        """End all builds within a moment, and a pause; finished graphs stay."""
        self._sessions.cancel_builds()

    @property
    def builds_are_paused(self) -> bool:
        """Whether the user has paused builds."""
        return self._sessions.are_paused

    def pause_builds(self) -> None:
        """End all builds within a moment, and start none until `go_on_with_builds`."""
        self._sessions.pause_builds()

    def go_on_with_builds(self) -> None:
        """End a pause, and build what is missing, also what was cancelled."""
        self._sessions.go_on_with_builds()

    # ------------------------------------------------------------------ inside

    def _attach(self, job: RunningJob, sampling: bool) -> None:
        """Attach the models that a job needs now and suspend all others."""
        if job.options is None:
            self.models.detach()
            self._running = "off"
            return
        self._running = "eager"
        if sampling:
            self.eager.clear_before_sampling()
        reason = self.host.refusal_reason(job.host_job)
        if reason is not None:
            self.models.detach()
            if sampling:
                self.eager.add(reason)
            else:
                self.eager.add_before_sampling(reason)
            return
        session = self._sessions.session_for(job.options)
        if session is self.expected:
            self.expected = None
        self.forget_expected()
        wanted = [
            (identity, model)
            for identity, model in self.host.models(job.ignores)
            if sampling or identity.role.is_vae
        ]
        self.models.attach_only(wanted, session)

    def _enter_foreground(self, job: RunningJob) -> None:
        """Until the job ends, builds give way to it and no graph changes."""
        with self.eager.on_failure():
            if job.options is not None:
                job.enter(self._sessions.session_for(job.options).picture())
            elif self.session is not None:
                job.enter(self.session.foreground.picture())  # builds nothing afterwards

    def _finish_ended(self, host_job: Any) -> None:
        """Finish this job, and jobs that were collected without an end."""
        for job in self.jobs:
            if job.host_job is host_job or job.host_job is None:
                self._finish(job)

    def _finish(self, job: RunningJob) -> None:
        self.jobs.remove(job)
        JobCloseHook.remove(job.host_job)
        with self.eager.on_failure():
            if self.session is not None and self.host.is_interrupted():
                self.session.timer.interrupt()
            job.leave_foreground()

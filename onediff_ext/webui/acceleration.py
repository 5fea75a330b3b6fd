"""Graphs under a WebUI's models: what the script calls around each job, whatever the host."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.core.status import Status
from onediff_ext.hosts.base import WebUIHost
from onediff_ext.session.session import Session
from onediff_ext.session.warm_up import (
    STAGES,
    WarmUp,
    WarmUpControl,
    WarmUpProgress,
    WarmUpReport,
    in_passes,
)
from onediff_ext.webui.attachment import Attachment
from onediff_ext.webui.deepcache import DeepCacheTally, Evaluation

logger = logging.getLogger(__name__)

# Called with (sizes done, sizes wanted) while warming up.
WarmUpListener = Callable[[int, int], None]

# Models that stay prepared between jobs: the current checkpoint, and others kept in memory.
_PARKED_LIMIT = 8
# Choices (backend, store) whose loaded graphs are kept for the next job that asks for them.
_SESSIONS_LIMIT = 3


class Acceleration:
    """Puts graphs under the host's models for each job and takes them away after it.

    One object serves the whole process. Jobs may come from any thread; the host
    runs them one at a time, and one may run inside another (a face restorer that
    draws with a processing object of its own).

    Nothing here raises on account of acceleration: on any failure the picture is
    drawn eager, and `status` says why. Between jobs nothing of the host is changed.

    Args:
        host: The adapter of the running WebUI.
    """

    def __init__(self, host: WebUIHost) -> None:
        self.host = host
        self._jobs: list[_Job] = []
        self._sessions: dict[CompileOptions, Session] = {}
        self._session: Session | None = None
        self._attached: list[Attachment] = []
        self._parked: list[Attachment] = []
        self._running = "off"
        self._reasons: list[str] = []
        self._early_reason: str | None = None  # given before the job came to its sampling
        self._fell_back: Counter[tuple[str, str]] = Counter()  # in the jobs before
        self._reused = DeepCacheTally()
        self._warming = WarmUpControl()
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ around a job

    def begin(
        self,
        job: Any,
        options: CompileOptions | None,
        ignores: frozenset[str] = frozenset(),
        *,
        deepcache: DeepCacheOptions = OFF,
        picture: bool = True,
    ) -> None:
        """A job starts: call from the script's ``process`` hook, before anything is encoded.

        May be called again for the same job (the img2img Batch tab does so for each
        picture). `end` follows by itself when the host closes the job, on errors too.

        Args:
            job: The host's processing object ``p``.
            options: What the user chose; None runs this job without graphs.
            ignores: Components to leave alone (`onediff_ext.core.options.parse_ignores`).
            deepcache: How much of the UNet's work is reused between the job's steps.
            picture: Whether somebody waits for a picture, within which no graph may change.
        """
        with self._lock:
            self._forget(job)
            self._prune()
            entry = _Job(weakref.ref(job), options, ignores, deepcache)
            self._jobs.append(entry)
            self._reasons, self._early_reason, self._reused = [], None, DeepCacheTally()
            if picture:
                self._open_picture(entry)
            with self._drawing_eager_on_failure():
                _CloseAndEnd.put_on(job, self)
                # Others may still put something of their own under the UNet before sampling,
                # and would then keep ours: only what runs before sampling is served yet.
                self._serve(entry, sampling=False)
            self._fell_back = Counter()
            if self._session is not None:
                self._fell_back = self._session.fell_back_so_far()

    def before_sampling(self, job: Any) -> None:
        """Sampling starts: call from ``process_before_every_sampling``, for each pass.

        The model may be another one than at `begin`, or may have been patched since.
        """
        with self._lock:
            entry = self._find(job)
            if entry is not None:
                with self._drawing_eager_on_failure():
                    self._serve(entry, sampling=True)

    def before_step(self, parameters: Any = None) -> None:
        """The sampler wants a prediction: call from ``on_cfg_denoiser``, with what that gets.

        A refiner may have taken the model's place.
        """
        with self._lock:
            if self._attached and self._jobs:
                with self._drawing_eager_on_failure():
                    self._serve(self._jobs[-1], sampling=True)
                    if parameters is not None:
                        self._reuse(parameters)

    def after_sampling(self, job: Any) -> None:
        """All passes of a batch are sampled: call from ``post_sample``. The VAE has yet to decode,
        and needs the memory."""
        with self._lock:
            if self._find(job) is not None:
                self._end_runs()

    def end(self, job: Any) -> None:
        """A job is over: call from ``postprocess``. Doing it twice does nothing.

        Every attribute of the host is as it was before `begin`, unless an outer job
        is still running.
        """
        with self._lock:
            self._end_runs()
            if not any(self._is_other(entry, job) for entry in self._jobs):
                self._detach()
            self._forget(job)
            self._prune()

    def model_loaded(self) -> None:
        """A checkpoint was loaded: call from ``on_model_loaded``, so that nothing here keeps
        the memory of one that is gone."""
        with self._lock:
            self._drop_parked(Attachment.is_gone)

    def close(self) -> None:
        """The extension is going away ("Reload UI", disabling): undo everything, end builds."""
        self.cancel()
        with self._lock:
            for entry in list(self._jobs):
                self._finish(entry)
            self._detach()
            self._drop_parked(lambda _: True)
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()
            self._running = "off"

    # ------------------------------------------------------------------ for people

    @property
    def session(self) -> Session | None:
        """The session of the latest job: its kinds, library and fallbacks."""
        return self._session

    def status(self) -> Status:
        """What pictures are drawn with, for panel and API; cheap, from any thread."""
        session, running, reasons = self._session, self._running, tuple(self._reasons)
        if session is None or running == "off":
            return Status(running, reasons=reasons)
        status = session.status(since=self._fell_back)
        return replace(
            status,
            running="eager" if reasons else status.running,
            reasons=tuple(dict.fromkeys((*reasons, *status.reasons))),
            deepcache=self._reused.line(),
        )

    def warm_up(
        self,
        shapes: Sequence[BatchShape],
        options: CompileOptions,
        ignores: frozenset[str] = frozenset(),
        listen: WarmUpListener | None = None,
    ) -> WarmUpReport | None:
        """Make everything ready that pictures of these sizes need, measure it, and wait for it.

        Runs as one of the host's own jobs, so it waits for its turn, and gives it up whenever
        another job waits.

        Args:
            shapes: Sizes, with pictures at once.
            options, ignores: As in `begin`; missing graphs are built whatever `options.build`
                says.
            listen: Called from the thread that warms up.

        Returns:
            What was done; None when nothing could be, which `status` explains.
        """
        self._warming.start()
        begun_with: list[object] = []

        def tell(done: int, left: int) -> None:
            if listen is not None:
                listen(len(shapes) - left + done, len(shapes))

        def one_pass(left: list[BatchShape]) -> WarmUpReport | None:
            reports: list[WarmUpReport | None] = []

            def task() -> None:
                checkpoint = self.host.checkpoint()
                begun_with.append(checkpoint and (checkpoint.name, checkpoint.digest))
                if begun_with[0] != begun_with[-1]:
                    return  # another one was loaded meanwhile, which nobody asked for
                if self._warming.is_cancelled:
                    reports.append(WarmUpReport(cancelled=True))
                    return
                job = _WarmUpJob()
                try:
                    with self._drawing_eager_on_failure():
                        reports.append(self._warm_up(job, left, options, ignores, tell))
                finally:
                    self.end(job)

            self.host.run_exclusively(task)
            return reports[0] if reports else None

        shapes = list(dict.fromkeys(shapes))
        return in_passes(shapes, one_pass, lambda: self._warming.is_cancelled)

    def cancel(self) -> None:
        """End a warm-up and all builds within a moment; what is built is kept. Builds go on
        with the next warm-up."""
        session = self._session
        self._warming.cancel()
        if session is not None:
            session.cancel_builds()

    # ------------------------------------------------------------------ inside

    def _serve(self, entry: _Job, sampling: bool) -> None:
        """Bring the host into the state that a job needs."""
        if entry.options is None:
            self._detach()
            self._running = "off"
            return
        self._running = "eager"
        if sampling and self._early_reason is not None:
            # It may have been of the job before: hosts clean up after that when this one begins.
            self._reasons.remove(self._early_reason)
            self._early_reason = None
        reason = self.host.refusal_reason(entry.job())
        if reason is not None:
            self._detach()
            self._note(reason)
            if not sampling:
                self._early_reason = reason
            return
        session, state = self._session_for(entry.options), self.host.state()
        wanted = [
            (name, model)
            for name, model in self.host.models(entry.ignores)
            if sampling or name.startswith("vae")
        ]
        for attachment in list(self._attached):
            if not any(attachment.fits(session, *item, state) for item in wanted):
                self._park(attachment)
        changed = self._tell_checkpoint(session, wanted)
        for item in wanted:
            if not any(a.fits(session, *item, state) for a in self._attached):
                self._attach(session, *item, state)
                changed = True
        if changed:
            # Blocks that are known already name their kinds no more: these are in use again.
            for kind in [k for a in self._attached for k in a.kinds()]:
                session.find(kind.key, kind.device, lambda kind=kind: kind)  # type: ignore[misc]

    def _reuse(self, parameters: Any) -> None:
        """Let DeepCache decide about the calls of the UNet that follow."""
        job = getattr(getattr(parameters, "denoiser", None), "p", None)
        entry = self._find(job) or self._jobs[-1]
        unet = next((a for a in self._attached if a.component.name == "unet"), None)
        if unet is not None:
            checkpoint = self.host.checkpoint()
            unet.reuse.begin_evaluation(
                entry.deepcache,
                Evaluation.read(parameters),
                self.host.weights(),
                "" if checkpoint is None else checkpoint.name,
                self._reused,
                unet.component.foreign,
            )
        elif entry.deepcache.is_on:
            self._reused.reason = "DeepCache needs the UNet among the components"

    def _end_runs(self) -> None:
        for attachment in self._attached:
            attachment.reuse.end_run()

    def _tell_checkpoint(self, session: Session, wanted: list[tuple[str, nn.Module]]) -> bool:
        """Have the session count and record what this checkpoint uses; whether it is another."""
        checkpoint = self.host.checkpoint()
        if checkpoint is None or not checkpoint.content_hash or not wanted:
            return False
        if session.checkpoint and session.checkpoint.content_hash == checkpoint.content_hash:
            return False
        parameter = next(wanted[0][1].parameters(), None)
        session.use_checkpoint(
            checkpoint.content_hash,
            name=checkpoint.name,
            path=checkpoint.path,
            architecture=checkpoint.architecture,
            device=None if parameter is None else parameter.device,
        )
        return True

    def _attach(self, session: Session, name: str, model: nn.Module, state: Hashable) -> None:
        attachment = next((a for a in self._parked if a.fits(session, name, model, state)), None)
        if attachment is None:
            self._drop_parked(lambda a: a.session is not session or a.is_gone())
            attachment = Attachment(self.host, session, name, model, state)
            owner = attachment.owner
            if owner is not None:
                weakref.finalize(owner, self._let_go, weakref.ref(attachment)).atexit = False
        else:
            self._parked.remove(attachment)
        attachment.install()
        self._attached.append(attachment)

    def _warm_up(
        self,
        job: _WarmUpJob,
        shapes: Sequence[BatchShape],
        options: CompileOptions,
        ignores: frozenset[str],
        listen: WarmUpListener,
    ) -> WarmUpReport | None:
        # Within a picture no graph would change, so this is none.
        options = replace(options, build="background")
        session = self._session_for(options)

        def tell(progress: WarmUpProgress) -> None:
            if progress.stage == STAGES[-1]:
                listen(progress.done, progress.needed)

        with self._lock:
            self.begin(job, options, ignores, picture=False)
            self.before_sampling(job)
            unets = [a.component for a in self._attached if not a.component.name.startswith("vae")]
        parameter = next((p for unet in unets for p in unet.model.parameters()), None)
        if parameter is None:
            if not self._reasons:
                self._note("there is no UNet to warm up")
            return None
        host, device = self.host, parameter.device
        warm_up = WarmUp(
            session, unets, host.step, host.vae_step, shapes, device, tell, host.is_waited_for
        )
        return self._warming.run(warm_up)

    def _park(self, attachment: Attachment) -> None:
        self._attached.remove(attachment)
        if attachment.owner is None and attachment.component.name.startswith(self.host.host_owned):
            attachment.undo()
            return
        attachment.suspend()
        self._parked.insert(0, attachment)
        for old in self._parked[_PARKED_LIMIT:]:
            old.undo()
        del self._parked[_PARKED_LIMIT:]

    def _session_for(self, options: CompileOptions) -> Session:
        # When to build is no reason to load all graphs a second time.
        key = replace(options, build="never")
        session = self._sessions.get(key)
        if session is None:
            session = Session(options, self.host.families(), self.host.rules())
            self._sessions[key] = session
            for old in list(self._sessions)[:-_SESSIONS_LIMIT]:
                self._sessions.pop(old).close()
        session.options = options
        self._session = session
        return session

    def _open_picture(self, entry: _Job) -> None:
        """Until the job ends, background work is gentle and no graph changes."""
        with self._drawing_eager_on_failure():
            if entry.options is not None:
                picture = self._session_for(entry.options).picture()
            elif self._session is not None:
                picture = self._session.foreground.picture()  # builds nothing afterwards
            else:
                return
            picture.__enter__()
            entry.picture = picture

    def _finish(self, entry: _Job) -> None:
        self._jobs.remove(entry)
        _CloseAndEnd.take_off(entry.job())
        picture, entry.picture = entry.picture, None
        if picture is not None:
            with self._drawing_eager_on_failure():
                picture.__exit__(None, None, None)

    def _detach(self) -> None:
        while self._attached:
            self._park(self._attached[-1])

    def _let_go(self, which: Callable[[], Attachment | None]) -> None:
        """The host has given up a model: keep nothing of it, so that its memory is free
        before the next one is loaded."""
        with self._lock:
            attachment = which()
            if attachment in self._attached:
                self._park(attachment)
            self._drop_parked(lambda a: a is attachment)

    def _drop_parked(self, which: Callable[[Attachment], bool]) -> None:
        for attachment in [a for a in self._parked if which(a)]:
            self._parked.remove(attachment)
            attachment.undo()

    @contextmanager
    def _drawing_eager_on_failure(self) -> Iterator[None]:
        """The one place that swallows errors: a picture is worth more than its speed."""
        try:
            yield
        except Exception as exc:
            self._note(f"failed: {str(exc) or type(exc).__name__}")
            logger.warning("This picture is drawn eager", exc_info=True)
            self._detach()

    def _note(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.append(reason)
            logger.info("Eager: %s", reason)

    def _find(self, job: Any) -> _Job | None:
        return next((entry for entry in self._jobs if entry.job() is job), None)

    @staticmethod
    def _is_other(entry: _Job, job: Any) -> bool:
        running = entry.job()
        return running is not None and running is not job

    def _forget(self, job: Any) -> None:
        entry = self._find(job)
        if entry is not None:
            self._finish(entry)

    def _prune(self) -> None:
        """Drop jobs that ended without a word, as a script's that raised may do."""
        for entry in [entry for entry in self._jobs if entry.job() is None]:
            self._finish(entry)


@dataclass(eq=False)
class _Job:
    """One running job; it must not keep the host's object alive."""

    job: Callable[[], Any]
    options: CompileOptions | None
    ignores: frozenset[str]
    deepcache: DeepCacheOptions
    picture: AbstractContextManager[None] | None = None


class _WarmUpJob:
    """Stands for a job that draws nothing."""


class _CloseAndEnd:
    """A job's ``close`` that ends its acceleration first: hosts call it however a job ends.

    Only the job itself holds it, so that a job which nobody closes can still go away.
    """

    def __init__(self, acceleration: Acceleration, job: Any) -> None:
        self._acceleration, self._job = acceleration, weakref.ref(job)
        self._own = vars(job).get("close")  # of the instance, seldom there
        self._close: Callable[[], Any] = job.close

    @classmethod
    def put_on(cls, job: Any, acceleration: Acceleration) -> None:
        if callable(getattr(job, "close", None)):
            vars(job)["close"] = cls(acceleration, job)

    @classmethod
    def take_off(cls, job: Any) -> None:
        ours = getattr(job, "__dict__", {}).get("close")
        if not isinstance(ours, cls) or ours._job() is not job:
            return  # a copy of a job brings the original's with it
        if ours._own is None:
            del vars(job)["close"]
        else:
            vars(job)["close"] = ours._own

    def __call__(self) -> Any:
        self._acceleration.end(self._job())
        return self._close()

"""The host's models that have graphs under them now, and those kept ready for the next job."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.hosts.base import HostCheckpoint, WebUIHost
from onediff_ext.session.session import Session
from onediff_ext.webui.attachment import Attachment
from onediff_ext.webui.deepcache import DeepCacheTally, Evaluation
from onediff_ext.webui.guidance import GuidanceTally
from onediff_ext.webui.running_jobs import RunningJob

ComponentModel = tuple[ComponentId, nn.Module]
"""A component and the host's module."""

# The current checkpoint's models, and those of other checkpoints that the host keeps in memory.
_MAX_SUSPENDED = 8


class AttachedModels:
    """Attaches graphs to the host's models and suspends them between jobs.

    Args:
        host: The adapter of the running WebUI.
        lock: Held by the caller of every method. The garbage collector's callback takes it
            itself, so it must be reentrant.

    Attributes:
        attached: Models with graphs under them now.
        suspended: Models prepared for a later job, the last used first. Every attribute of
            these is the host's own.
    """

    def __init__(self, host: WebUIHost, lock: AbstractContextManager[Any]) -> None:
        self._host, self._lock = host, lock
        self.attached: list[Attachment] = []
        self.suspended: list[Attachment] = []

    @property
    def denoisers(self) -> list[Attachment]:
        """The attached UNet and ControlNets."""
        return [a for a in self.attached if not a.component.role.is_vae]

    def attach_only(self, wanted: Sequence[ComponentModel], session: Session) -> None:
        """Attach these models and suspend all others.

        Args:
            wanted: The models that draw now.
            session: The owner of their graphs.
        """
        state = self._host.state()
        for attachment in list(self.attached):
            if not any(attachment.fits(session, *model, state) for model in wanted):
                self._suspend(attachment)
        changed = self._use_checkpoint(session, wanted)
        for identity, model in wanted:
            if not any(a.fits(session, identity, model, state) for a in self.attached):
                self._attach(session, identity, model, state)
                changed = True
        if changed:
            # Blocks that already know their kind do not report it again; these are in use too.
            for kind in [kind for a in self.attached for kind in a.kinds()]:
                session.find(kind.key, kind.device, lambda kind=kind: kind)  # type: ignore[misc]

    def detach(self) -> None:
        """Suspend all attached models."""
        while self.attached:
            self._suspend(self.attached[-1])

    def drop_gone(self) -> None:
        """Drop suspended models whose weights the host has given up."""
        self._drop_suspended(Attachment.is_gone)

    def close(self) -> None:
        """Detach all models and drop them."""
        self.detach()
        self._drop_suspended(lambda _: True)

    def begin_evaluation(
        self, parameters: Any, job: RunningJob, tally: DeepCacheTally, guided: GuidanceTally
    ) -> None:
        """Let DeepCache and guidance steps decide about the UNet's next calls.

        Args:
            parameters: The argument of the host's ``on_cfg_denoiser`` callback.
            job: With what the user chose.
            tally: Counts what DeepCache does for the job.
            guided: Counts what guidance steps do for the job.
        """
        options = job.deepcache
        unet = next((a for a in self.attached if a.component.role is Role.UNET), None)
        if unet is None:
            if options.is_on:
                tally.reason = "DeepCache needs the UNet among the components"
            if job.guidance_steps.is_on:
                guided.reason = "the UNet is not among the components"
            return
        checkpoint = self._host.checkpoint()
        evaluation = Evaluation.read(parameters)
        denoiser = getattr(parameters, "denoiser", None)
        foreign = unet.component.foreign or self._host.split_calls_reason(denoiser)
        unet.deepcache.begin_evaluation(
            options,
            evaluation,
            self._host.weights(),
            "" if checkpoint is None else checkpoint.name,
            tally,
            foreign,
        )
        unet.guidance.begin_evaluation(job.guidance_steps, evaluation, guided, foreign)

    def end_runs(self) -> None:
        """End the run of each attached model: features are freed, guidance steps are over."""
        for attachment in self.attached:
            attachment.guidance.end_run()
            attachment.deepcache.end_run()

    def _use_checkpoint(self, session: Session, wanted: Sequence[ComponentModel]) -> bool:
        """Tell the session which checkpoint draws now; returns whether it is another one."""
        checkpoint = self._host.checkpoint()
        if checkpoint is None or not checkpoint.content_hash or not wanted:
            return False
        if session.checkpoint and session.checkpoint.content_hash == checkpoint.content_hash:
            return False
        parameter = next(wanted[0][1].parameters(), None)
        device = self._host.device() or (None if parameter is None else parameter.device)
        use_checkpoint(session, checkpoint, device)
        return True

    def _attach(
        self, session: Session, identity: ComponentId, model: nn.Module, state: Hashable
    ) -> None:
        fitting = (a for a in self.suspended if a.fits(session, identity, model, state))
        attachment = next(fitting, None)
        if attachment is None:
            self._drop_suspended(lambda a: a.session is not session or a.is_gone())
            attachment = Attachment(self._host, session, identity, model, state)
            owner = attachment.owner
            if owner is not None:
                reference = weakref.ref(attachment)
                weakref.finalize(owner, self._on_owner_collected, reference).atexit = False
        else:
            self.suspended.remove(attachment)
        attachment.install()
        self.attached.append(attachment)

    def _suspend(self, attachment: Attachment) -> None:
        self.attached.remove(attachment)
        if attachment.owner is None and attachment.component.role in self._host.host_owned:
            attachment.undo()
            return
        attachment.suspend()
        self.suspended.insert(0, attachment)
        for old in self.suspended[_MAX_SUSPENDED:]:
            old.undo()
        del self.suspended[_MAX_SUSPENDED:]

    def _on_owner_collected(self, reference: Callable[[], Attachment | None]) -> None:
        """Drop a model that the host has given up; its memory is free before the next one loads."""
        with self._lock:
            attachment = reference()
            if attachment in self.attached:
                self._suspend(attachment)
            self._drop_suspended(lambda a: a is attachment)

    def _drop_suspended(self, which: Callable[[Attachment], bool]) -> None:
        for attachment in [a for a in self.suspended if which(a)]:
            self.suspended.remove(attachment)
            attachment.undo()


def use_checkpoint(
    session: Session, checkpoint: HostCheckpoint, device: torch.device | None
) -> None:
    """Tell a session which of the host's checkpoints draws from now on.

    Args:
        session: Begins to load the graphs that this checkpoint used last time.
        checkpoint: With a content hash.
        device: Where its models will be; None loads nothing ahead.
    """
    session.use_checkpoint(
        checkpoint.content_hash,
        name=checkpoint.name,
        path=checkpoint.path,
        architecture=checkpoint.architecture,
        device=device,
    )

"""The host's running jobs and what the user chose for each."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.options import CompileOptions


@dataclass(eq=False)
class RunningJob:
    """One running job. It does not keep the host's object alive.

    Args:
        reference: Weak reference to the host's processing object ``p``.
        options: What the user chose; None runs the job without graphs.
        ignores: Components that stay eager.
        deepcache: How much of the UNet's work is reused between steps.
        guidance_steps: In which steps guidance is computed.
    """

    reference: weakref.ref[Any]
    options: CompileOptions | None
    ignores: frozenset[str]
    deepcache: DeepCacheOptions
    guidance_steps: GuidanceOptions
    _foreground: AbstractContextManager[None] | None = None

    @property
    def host_job(self) -> Any:
        """The host's processing object ``p``; None once it is collected."""
        return self.reference()

    def enter(self, foreground: AbstractContextManager[None]) -> None:
        """Enter a context that lasts until `leave_foreground`; builds give way meanwhile."""
        foreground.__enter__()
        self._foreground = foreground

    def leave_foreground(self) -> None:
        """Leave the context of `enter`, if there is one."""
        foreground, self._foreground = self._foreground, None
        if foreground is not None:
            foreground.__exit__(None, None, None)


class RunningJobs:
    """All running jobs, in the order of their start. One job may run inside another."""

    def __init__(self) -> None:
        self._jobs: list[RunningJob] = []

    def __iter__(self) -> Iterator[RunningJob]:
        return iter(list(self._jobs))

    def add(self, job: RunningJob) -> None:
        """Add a job that starts."""
        self._jobs.append(job)

    def remove(self, job: RunningJob) -> None:
        """Remove a job that ended."""
        self._jobs.remove(job)

    def find(self, host_job: Any) -> RunningJob | None:
        """The entry of a host's job, or None."""
        return next((job for job in self._jobs if job.host_job is host_job), None)

    @property
    def innermost(self) -> RunningJob | None:
        """The job that started last, or None."""
        return self._jobs[-1] if self._jobs else None

    def has_other_than(self, host_job: Any) -> bool:
        """Whether another job than this one still runs."""
        others = (job.host_job for job in self._jobs)
        return any(other is not None and other is not host_job for other in others)

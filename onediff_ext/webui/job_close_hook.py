"""The hook on a job's ``close`` that removes the graphs, however the job ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class JobCloseHook:
    """A job's ``close`` that first calls `end`. Hosts close a job on errors too.

    Only the job itself holds the hook, so a job that nobody closes can still be collected.

    Args:
        job: The host's processing object ``p``.
        end: Called with the job before its own ``close``.
    """

    def __init__(self, job: Any, end: Callable[[Any], None]) -> None:
        self._end, self._job = end, weakref.ref(job)
        self._instance_close = vars(job).get("close")  # seldom there; most have the class's only
        self._close: Callable[[], Any] = job.close

    @classmethod
    def install(cls, job: Any, end: Callable[[Any], None]) -> None:
        """Put the hook on a job that has a ``close``."""
        if callable(getattr(job, "close", None)):
            vars(job)["close"] = cls(job, end)

    @classmethod
    def remove(cls, job: Any) -> None:
        """Restore the job's own ``close``; a job without this hook stays as it is."""
        hook = getattr(job, "__dict__", {}).get("close")
        if not isinstance(hook, cls) or hook._job() is not job:
            return  # a copied job carries the hook of the original
        if hook._instance_close is None:
            del vars(job)["close"]
        else:
            vars(job)["close"] = hook._instance_close

    def __call__(self) -> Any:
        self._end(self._job())
        return self._close()

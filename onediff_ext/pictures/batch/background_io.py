"""Threads that read and write images while another one draws.

A GPU is idle while the drawing thread compresses PNG files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Iterator[Item]) -> Generator[Item]:
    """Yield the same items; a thread makes the next one while the current one is in use."""
    with ThreadPoolExecutor(1, "onediff-input") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """Runs jobs in one thread, in order; an error ends all of them.

    The end of the ``with`` block waits for all queued jobs, also after an error or Ctrl-C. It
    raises a job's error unless the block itself raises one.

    Args:
        limit: Jobs that may wait or run at the same time.
    """

    def __init__(self, limit: int = 2) -> None:
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, "onediff-output")
        self._queued: deque[Future[None]] = deque()
        self._failed = False

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job; waits while the queue is full.

        Raises:
            BaseException: The error of an earlier job.
        """
        while self._queued and (self._queued[0].done() or len(self._queued) >= self._limit):
            self._queued.popleft().result()
        self._queued.append(self._thread.submit(self._do, job))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown()
        if exc is None:
            for done in self._queued:
                done.result()

    def _do(self, job: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            job()
        except BaseException:
            self._failed = True
            raise

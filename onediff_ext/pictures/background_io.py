"""Reading and writing pictures in threads, beside the one that draws.

A GPU has nothing to do while a picture is compressed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, each of which is made in a thread while the one before it is in use."""
    with ThreadPoolExecutor(1, "onediff-input") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


class Writing(AbstractContextManager["Writing"]):
    """Does jobs in one thread, in the order in which they came; an error ends them all.

    At the end of the ``with`` block all that was queued is done, also when the block ends with an
    error or Ctrl-C; what a job raised is raised there, unless the block has an error of its own.

    Args:
        limit: Jobs that may wait or be under way.
    """

    def __init__(self, limit: int = 2) -> None:
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, "onediff-output")
        self._queued: deque[Future[None]] = deque()
        self._failed = False

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job, as soon as there is room.

        Raises:
            BaseException: What an earlier job raised.
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

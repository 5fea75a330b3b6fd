"""The batches of a run, for several drawers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from onediff_ext.pictures.batch.batch_drawer import BatchToDraw


class SharedBatches:
    """Hands out batches in their order, to threads.

    Args:
        batches: All of them, as they are read.
    """

    def __init__(self, batches: Iterator[BatchToDraw]) -> None:
        self._batches = batches
        self._given_back: deque[BatchToDraw] = deque()
        self._taken = 0
        self._is_over = False
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left for anybody."""
        return self._is_over

    def take(self) -> BatchToDraw | None:
        """Return the next batch; `done` or `give_back` follows.

        The last batches may be given back, so it waits until all are done.

        Returns:
            None when nothing is left.
        """
        with self._changed:
            while not self._is_over:
                batch = (
                    self._given_back.popleft() if self._given_back else next(self._batches, None)
                )
                if batch is not None:
                    self._taken += 1
                    return batch
                if not self._taken:
                    self._end()
                else:
                    self._changed.wait()
            return None

    def done(self) -> None:
        """A batch that was taken is drawn, or is left to the next run."""
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()

    def give_back(self, batch: BatchToDraw) -> None:
        """A batch that was taken was not drawn; it is the next one."""
        with self._changed:
            self._given_back.append(batch)
            self._taken -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out no more."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._changed.notify_all()

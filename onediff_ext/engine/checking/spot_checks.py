"""The check that never ends: now and then a graph in use is compared with eager again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Of the time that forwards take.
SHARE = 0.01
# What the first check may take; later ones are as dear as the last one was.
_FIRST_COST_S = 0.02


class SpotChecks:
    """Chooses, at random, a block whose graph is compared with eager in the forward that comes.

    A forward that is replayed as a whole is compared as a whole then.

    Args:
        enabled: False chooses none.
        seed: For tests.

    Attributes:
        chosen: The runner chosen for this forward, or None.
        done: How many comparisons were made.
    """

    def __init__(self, enabled: bool = True, seed: int | None = None) -> None:
        self.enabled = enabled
        self.chosen: object = None
        self.done = 0
        self._random = random.Random(seed)
        self._forwards_s = self._spent_s = 0.0
        self._needed_s = _FIRST_COST_S
        self._depth = 0

    @contextmanager
    def forward(self, runners: Sequence[object]) -> Iterator[None]:
        """One forward of a model with these runners."""
        start, spent = time.perf_counter(), self._spent_s
        if self.enabled and runners and not self._depth:
            saved = SHARE * self._forwards_s - self._spent_s
            if saved >= self._needed_s:
                self.chosen = self._random.choice(runners)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.chosen = None
            if not self._depth:
                checking = self._spent_s - spent
                self._forwards_s += max(0.0, time.perf_counter() - start - checking)

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """What the ``with`` block does is a comparison that nothing else needs."""
        self.chosen = None
        start = time.perf_counter()
        try:
            yield
        finally:
            cost = time.perf_counter() - start
            self.done += 1
            self._spent_s += cost
            self._needed_s = cost * self._random.uniform(0.1, 1.9)

"""Spot checks: graphs in use are compared with eager again, at random."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Share of the time of all forwards.
SHARE = 0.01
# Assumed cost of the first check; later ones are assumed to cost what the last one did.
_FIRST_COST_S = 0.02


class SpotChecks:
    """Chooses a random block whose graph is compared with eager in the next forward.

    A forward that a CUDA graph replays is compared as a whole.

    Args:
        enabled: False chooses none.
        seed: Of the random choice, for tests.

    Attributes:
        chosen: The runner chosen for this forward, or None.
        done: Number of comparisons so far.
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
        """Time one forward of a model, and perhaps choose one of its runners.

        Args:
            runners: The runners of the model's blocks.
        """
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
        """Time the comparison within the ``with`` block."""
        self.chosen = None
        start = time.perf_counter()
        try:
            yield
        finally:
            cost = time.perf_counter() - start
            self.done += 1
            self._spent_s += cost
            self._needed_s = cost * self._random.uniform(0.1, 1.9)

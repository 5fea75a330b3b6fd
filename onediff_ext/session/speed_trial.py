"""Whether forwards of one size are faster on two devices than on one, as measured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onediff_ext.engine.stopwatch import Timing, stopwatch

# Forwards of a size before the first one that counts: CUDA graphs are recorded and compared.
_UNTIMED_ON_TWO, _UNTIMED_ON_ONE = 5, 2
_TIMED = 4


class SpeedTrial:
    """Times the first forwards of one size: some on two devices, then some on one.

    The fastest of each count, since a busy machine only makes forwards slower.

    Args:
        graphs: How many graphs there are. With others the trial says nothing.

    Attributes:
        graphs: As given.
        slower: ``"116 against 29 ms"`` where two devices are not faster; else "".
    """

    def __init__(self, graphs: int = 0) -> None:
        self.graphs, self.slower = graphs, ""
        self._two = _Forwards(_UNTIMED_ON_TWO)
        self._one = _Forwards(_UNTIMED_ON_ONE)

    @property
    def is_ones_turn(self) -> bool:
        """Whether the next forward has to run on one device."""
        return self._two.is_done and not self._one.is_done

    def start(self, device: torch.device) -> Callable[[], None]:
        """Time a forward that begins now, on as many devices as it is the turn of.

        Args:
            device: Where its result lies.

        Returns:
            To be called at the forward's end. A forward that failed does not count.
        """
        forwards = self._one if self._two.is_done else self._two
        stop = stopwatch(device)
        return lambda: forwards.add(stop())

    def judge(self) -> None:
        """Compare the times once they are all there, which waits for the last forward's end."""
        if self._one.is_done and self._one.times:
            one, two = self._one.fastest_ms(), self._two.fastest_ms()
            if two >= one:
                self.slower = f"{two:.0f} against {one:.0f} ms"


class _Forwards:
    """The times of some forwards after the first ones.

    Args:
        untimed: How many come first.
    """

    def __init__(self, untimed: int) -> None:
        self._left = untimed + _TIMED
        self.times: list[Timing] = []

    @property
    def is_done(self) -> bool:
        return self._left <= 0

    def add(self, seconds: Timing) -> None:
        """Count a forward, and keep its time if that counts."""
        self._left -= 1
        if 0 <= self._left < _TIMED:
            self.times.append(seconds)

    def fastest_ms(self) -> float:
        """Return the least, and forget the times: they are read once."""
        found = min(read() for read in self.times) * 1000
        self.times = []
        return found

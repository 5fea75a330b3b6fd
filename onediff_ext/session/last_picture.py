"""What the last picture was drawn with, and which calls ran eager."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from onediff_ext.engine.running.block_runner import BlockRunner


@dataclass(frozen=True)
class Fallback:
    """Calls that ran eager although a graph was wanted.

    Args:
        what: The kind or class of block.
        reason: Why, in plain words.
        count: How many calls.
    """

    what: str
    reason: str
    count: int


class Fallbacks:
    """Counts them, by what and reason. Any thread draws or asks."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, what: str, reason: str) -> None:
        """One call."""
        with self._lock:
            self._counts[what, reason] += 1

    def so_far(self) -> Counter[tuple[str, str]]:
        """This moment, for `since`."""
        with self._lock:
            return self._counts.copy()

    def since(self, moment: Counter[tuple[str, str]] | None = None) -> list[Fallback]:
        """Most frequent first; all, or those after a moment."""
        counts = self.so_far() - (moment or Counter())
        return [Fallback(*key, count) for key, count in counts.most_common()]


class Drawn(Protocol):
    """A component that draws, as the status sees it."""

    runners: list[BlockRunner]


class LastPicture:
    """The components that drew the last picture, as far as they still exist."""

    def __init__(self) -> None:
        self._components: weakref.WeakKeyDictionary[Drawn, None] = weakref.WeakKeyDictionary()
        self._number = 0
        self._lock = threading.Lock()

    def add(self, component: Drawn, number: int) -> None:
        """A component takes part in a picture.

        Args:
            component: The component.
            number: Of the picture. Where nobody tells of pictures, all are one.
        """
        with self._lock:
            if number != self._number:
                self._number = number
                self._components.clear()
            self._components[component] = None

    def forget(self) -> None:
        """Another checkpoint will draw the next one."""
        with self._lock:
            self._components.clear()

    @property
    def components(self) -> list[Drawn]:
        """Those that took part."""
        with self._lock:
            return list(self._components)

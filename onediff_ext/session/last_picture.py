"""The components of the last picture, and the calls that ran eager."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.session.foreign_blocks import ForeignBlocks


@dataclass(frozen=True)
class Fallback:
    """Calls that ran eager although a graph was wanted.

    Args:
        what: The kind or class of block.
        reason: Why they ran eager.
        count: Number of calls.
    """

    what: str
    reason: str
    count: int


class Fallbacks:
    """Counts fallbacks by block and reason. Any thread may use it."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, what: str, reason: str) -> None:
        """Count one call.

        Args:
            what, reason: As in `Fallback`.
        """
        with self._lock:
            self._counts[what, reason] += 1

    def so_far(self) -> Counter[tuple[str, str]]:
        """Return the counts until this moment, for `since`."""
        with self._lock:
            return self._counts.copy()

    def since(self, moment: Counter[tuple[str, str]] | None = None) -> list[Fallback]:
        """Return the fallbacks, most frequent first.

        Args:
            moment: From `so_far`: only later calls count; None counts all.
        """
        counts = self.so_far() - (moment or Counter())
        return [Fallback(*key, count) for key, count in counts.most_common()]


class Drawn(Protocol):
    """A component with the runners of its blocks.

    Attributes:
        runners: One for each block that may have a graph.
        foreign_blocks: The other blocks, and which extensions changed the model.
    """

    runners: list[BlockRunner]
    foreign_blocks: ForeignBlocks


class LastPicture:
    """The components that drew the last picture and still exist.

    Attributes:
        number: Of the picture. For a host that does not announce pictures, all have one number.
    """

    def __init__(self) -> None:
        self._components: weakref.WeakKeyDictionary[Drawn, None] = weakref.WeakKeyDictionary()
        self.number = 0
        self._lock = threading.Lock()

    def add(self, component: Drawn, number: int) -> bool:
        """Count a component to a picture.

        Args:
            component: One whose forward runs now.
            number: Of the picture, from `ForegroundScheduler.pictures_begun`.

        Returns:
            Whether the component is new in the picture.
        """
        with self._lock:
            if number != self.number:
                self.number = number
                self._components.clear()
            is_new = component not in self._components
            self._components[component] = None
            return is_new

    def forget(self) -> None:
        """Forget the components: another checkpoint draws the next picture."""
        with self._lock:
            self._components.clear()

    @property
    def components(self) -> list[Drawn]:
        """The components of the last picture."""
        with self._lock:
            return list(self._components)

    def kinds(self) -> set[BlockKind]:
        """Return the block kinds of the last picture."""
        runners = (runner for component in self.components for runner in list(component.runners))
        return {runner.used for runner in runners if runner.used is not None}

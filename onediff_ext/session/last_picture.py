"""The components of the last picture, and the calls that ran eager."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from onediff_ext.core.forks import fork_safe_lock
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
        self._lock = fork_safe_lock()

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


@dataclass(frozen=True)
class DrawnBlock:
    """How one block was called in a picture.

    Args:
        kind: As `BlockRunner.used`.
        eager_reason: As `BlockRunner.eager_reason`.
    """

    kind: BlockKind | None
    eager_reason: str | None


@dataclass(frozen=True)
class DrawnBlocks:
    """How the blocks of one component were called in a picture.

    Args:
        blocks: Those that have a runner and were called.
        replaced, changed_by: As in `ForeignBlocks`.
    """

    blocks: tuple[DrawnBlock, ...]
    replaced: tuple[tuple[str, int], ...]
    changed_by: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, component: Drawn) -> DrawnBlocks:
        """Read how the blocks of a component were called last.

        Args:
            component: Right after a picture, so that the last call was one of it.

        Returns:
            What `LastPicture` keeps of it.
        """
        foreign = component.foreign_blocks
        return cls(
            tuple(
                DrawnBlock(runner.used, runner.eager_reason)
                for runner in list(component.runners)
                if runner.eager_reason != ""
            ),
            tuple(foreign.replaced),
            tuple(foreign.changed_by.items()),
        )


class LastPicture:
    """The components that drew the last picture and still exist.

    A warm-up runs the same blocks, often without the extension that kept some of them eager. So
    what they did in the picture is kept at the picture's end, until the next one.

    Attributes:
        number: Of the picture. For a host that does not announce pictures, all have one number.
    """

    def __init__(self) -> None:
        self._components: weakref.WeakKeyDictionary[Drawn, None] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[Drawn, DrawnBlocks] = weakref.WeakKeyDictionary()
        self._is_warm_up = False
        self.number = 0
        self._lock = fork_safe_lock()

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
            if not self._is_warm_up:
                self._kept.clear()
            is_new = component not in self._components
            self._components[component] = None
            return is_new

    def forget(self) -> None:
        """Forget the components: another checkpoint draws the next picture."""
        with self._lock:
            self._components.clear()
            self._kept.clear()

    def keep(self) -> None:
        """Keep what the blocks did, until a forward of the next picture."""
        with self._lock:
            if not (self._kept or self._is_warm_up):
                for component in list(self._components):
                    self._kept[component] = DrawnBlocks.of(component)

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Run forwards within the ``with`` block that belong to no picture."""
        self.keep()
        self._is_warm_up = True
        try:
            yield
        finally:
            self._is_warm_up = False

    @property
    def components(self) -> list[Drawn]:
        """The components of the last picture."""
        with self._lock:
            return list(self._components)

    def drawn(self) -> list[DrawnBlocks]:
        """Return what the blocks did in the last picture; before one, in the last forwards.

        A component without graphs any more counts no blocks.
        """
        with self._lock:
            kept = [
                drawn
                for component, drawn in self._kept.items()
                if component.runners or not drawn.blocks
            ]
            return kept or [DrawnBlocks.of(component) for component in self._components]

    def kinds(self) -> set[BlockKind]:
        """Return the block kinds of the last picture."""
        runners = (runner for component in self.components for runner in list(component.runners))
        return {runner.used for runner in runners if runner.used is not None}

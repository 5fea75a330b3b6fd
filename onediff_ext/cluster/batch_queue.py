"""Which batch a worker gets next. Knows batches by number only, so its memory stays flat.

Batches of one canvas size form a group. A worker stays in its group, so its CUDA graphs are used
again. A batch whose worker died is a *suspect* and is drawn alone on a worker, so that another
death is its own. Then its pictures are *probed*, one by one, without writing. A picture that
kills its worker alone `MOST_DEATHS` times is poisoned; the rest of the batch is drawn together, as
it is everywhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

MOST_DEATHS = 3
"""A picture that kills its worker so often while it is alone there is given up."""
_MOST_PROBES = 2  # rounds of probes that find nothing; then each picture is drawn by itself


@dataclass(frozen=True)
class Unit:
    """What one worker gets at once: a batch, or a part of it.

    Args:
        group: Number of the batch's group.
        batch: Number of the batch in its group.
        positions: The pictures of the batch that are drawn, by their place in it.
        writes: Results are written; a probe only draws.
        alone: The worker does nothing else meanwhile.
    """

    group: int
    batch: int
    positions: tuple[int, ...]
    writes: bool = True
    alone: bool = False


@dataclass
class _Trouble:
    """A batch that was in a worker's hands when that worker died."""

    size: int
    poisoned: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    deaths: dict[int, int] = field(default_factory=dict)
    probes: deque[int] = field(default_factory=deque)
    rounds: int = 0

    @property
    def left(self) -> tuple[int, ...]:
        return tuple(p for p in range(self.size) if p not in self.poisoned | self.done)


@dataclass(frozen=True)
class Poisoned:
    """A picture that is given up.

    Args:
        group, batch, position: Which one.
    """

    group: int
    batch: int
    position: int


class BatchQueue:
    """The batches of one run that are not drawn yet.

    Args:
        group_sizes: Pictures in each group.
        batch_sizes: Pictures in a batch of each group; a group's last batch may be smaller.
        costs: Work of one picture of each group, in any unit such as pixels; all equal by default.
    """

    def __init__(
        self,
        group_sizes: Sequence[int],
        batch_sizes: Sequence[int],
        costs: Sequence[float] | None = None,
    ) -> None:
        self._sizes, self._batch_sizes = list(group_sizes), list(batch_sizes)
        self._costs = list(costs) if costs is not None else [1.0] * len(self._sizes)
        self._next = [0] * len(self._sizes)  # the first batch that nobody has had
        self._open = {group for group, size in enumerate(self._sizes) if size}
        self._group_of: dict[Hashable, int] = {}
        self._workers_in = [0] * len(self._sizes)
        self._again: deque[Unit] = deque()
        self._suspects: deque[Unit] = deque()
        self._troubles: dict[tuple[int, int], _Trouble] = {}
        self._unfinished = sum(map(self.batches_in, range(len(self._sizes))))

    def batches_in(self, group: int) -> int:
        """Return the number of batches of a group."""
        return -(-self._sizes[group] // self._batch_sizes[group])

    @property
    def is_finished(self) -> bool:
        """Whether every picture is written or given up."""
        return self._unfinished == 0

    def take(self, worker: Hashable, *, idle: bool) -> Unit | None:
        """Return the next unit for a worker.

        Args:
            worker: Who asks.
            idle: It has nothing else to do; suspects go to idle workers only.

        Returns:
            None when nothing is left for it now.
        """
        if idle and self._suspects:
            return self._suspects.popleft()
        if self._again:
            return self._again.popleft()
        group = self._group_for(worker)
        if group is None:
            return None
        batch = self._next[group]
        self._next[group] += 1
        if self._next[group] == self.batches_in(group):
            self._open.discard(group)
        most = self._batch_sizes[group]
        size = min(most, self._sizes[group] - batch * most)
        return Unit(group, batch, tuple(range(size)))

    def forget(self, worker: Hashable) -> None:
        """A worker is gone."""
        group = self._group_of.pop(worker, None)
        if group is not None:
            self._workers_in[group] -= 1

    def give_back(self, unit: Unit) -> None:
        """A unit was not drawn, and nobody is to blame."""
        (self._suspects if unit.alone else self._again).appendleft(unit)

    def done(self, unit: Unit) -> None:
        """A unit was drawn, and written unless it was a probe."""
        trouble = self._troubles.get((unit.group, unit.batch))
        if trouble is None:
            self._unfinished -= 1
        elif not unit.writes:
            self._after_probe(unit, trouble)
        else:
            trouble.done.update(unit.positions)
            self._end_if_complete(unit, trouble)

    def killed(self, unit: Unit) -> list[Poisoned]:
        """A worker died while it had a unit, and the unit may be the cause.

        Returns:
            Pictures that are given up now.
        """
        if not unit.alone:
            trouble = _Trouble(len(unit.positions))
            self._troubles[unit.group, unit.batch] = trouble
            self._suspect(unit, unit.positions, writes=True)
            return []
        trouble = self._troubles[unit.group, unit.batch]
        if len(unit.positions) > 1:
            trouble.rounds += 1
            if trouble.rounds > _MOST_PROBES:
                for position in unit.positions:
                    self._suspect(unit, (position,), writes=True)
            else:
                trouble.probes.extend(unit.positions)
                self._suspect(unit, (trouble.probes.popleft(),), writes=False)
            return []
        [position] = unit.positions
        trouble.deaths[position] = trouble.deaths.get(position, 0) + 1
        if trouble.deaths[position] < MOST_DEATHS:
            self._suspects.appendleft(unit)
            return []
        trouble.poisoned.add(position)
        if unit.writes:
            self._end_if_complete(unit, trouble)
        else:
            self._after_probe(unit, trouble)
        return [Poisoned(unit.group, unit.batch, position)]

    def _after_probe(self, unit: Unit, trouble: _Trouble) -> None:
        if trouble.probes:
            self._suspect(unit, (trouble.probes.popleft(),), writes=False)
        elif trouble.left:
            self._suspect(unit, trouble.left, writes=True)
        else:
            self._end_if_complete(unit, trouble)

    def _suspect(self, unit: Unit, positions: tuple[int, ...], *, writes: bool) -> None:
        self._suspects.append(Unit(unit.group, unit.batch, positions, writes, alone=True))

    def _end_if_complete(self, unit: Unit, trouble: _Trouble) -> None:
        if not trouble.left:
            del self._troubles[unit.group, unit.batch]
            self._unfinished -= 1

    def _group_for(self, worker: Hashable) -> int | None:
        """The worker's group while it has batches, else the one with most work for each worker."""
        own = self._group_of.get(worker)
        if own in self._open:
            return own
        self.forget(worker)
        if not self._open:
            return None
        group = max(self._open, key=self._work_for_each)
        self._group_of[worker] = group
        self._workers_in[group] += 1
        return group

    def _work_for_each(self, group: int) -> tuple[float, int]:
        left = self._sizes[group] - self._next[group] * self._batch_sizes[group]
        return self._costs[group] * left / (1 + self._workers_in[group]), -group

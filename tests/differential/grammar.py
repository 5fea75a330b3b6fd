"""Which operation comes next: drawn at random, by rules that bring related ones together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from tests.differential import operations  # noqa: F401  (registers them)
from tests.differential.registry import OPERATIONS, Operation

if TYPE_CHECKING:
    from tests.differential.world import World

# Each sequence prefers two groups of operations ("swarm testing", Groce et al. 2012): if all were
# drawn alike, a LoRA would rarely still be loaded when its weights are written.
_GROUPS = sorted({operation.group for operation in OPERATIONS.values()})
_PREFERRED = 6.0
# Where nothing is replayed, no replay can be stale: how often the next step ends that, if it can.
_RESTORING = 0.6
# How often the next step is one of `Operation.then` of the last step, or of what is on or loaded
# while there are replays: two operations that show a fault only together would rarely meet by
# chance.
_FOLLOWING, _CHANGING = 0.85, 0.4
# How often the next step, while there are replays, is something that this run has not done yet.
_NEW = 0.4
# How often a scene begins: all features end, an operation comes, replays, and one of its `then`,
# twice.
_SCENE = 0.07
# How often a sequence begins with a LoRA, as many people load one first: otherwise it is rarely
# loaded, replayed and changed within one sequence.
_WITH_A_LORA = 0.5
# The same operation twice in a row shows less than another one.
_REPEATED = 0.3


class Grammar:
    """Draws the operations of one sequence.

    Args:
        random: Decides.
        done: How often each operation was done in the whole run; rare ones come sooner.
    """

    def __init__(self, random: Random, done: Mapping[str, int]) -> None:
        self._random, self._done = random, done
        self._preferred = random.sample(_GROUPS, 2)
        self._last = ""
        self._wants_scene = False
        self._planned = ["lora_add", "again"] if random.random() < _WITH_A_LORA else []

    def next(self, world: World) -> Operation:
        """The next operation that fits."""
        self._plan(world)
        chosen = None
        while self._planned and chosen is None:
            planned = OPERATIONS[self._planned.pop(0)]
            chosen = planned if planned.fits(world) else None
        chosen = chosen or self._drawn(world)
        self._last = chosen.name
        return chosen

    def _plan(self, world: World) -> None:
        """Begin a scene at times: what is on ends first, then its steps follow."""
        if self._planned:
            return
        if self._wants_scene:
            self._wants_scene = False
            scenes = [
                (op.name, then) for op in OPERATIONS.values() if op.fits(world) for then in op.then
            ]
            rare = [1 / (1 + self._done[then]) for _, then in scenes]
            head, shown = self._random.choices(scenes, rare)[0]
            # There and back: a CUDA graph of the state before may be replayed again.
            self._planned = [head, "again", shown, "again", shown, "again"]
        elif world.compiles and self._random.random() < _SCENE:
            self._wants_scene = True
            offs = [f"{name}_off" for name in reversed(world.on)]
            self._planned = [
                *offs,
                "builds_released",
                "compile_again",
                "lora_unfuse",
                "lora_unload",
            ]

    def _drawn(self, world: World) -> Operation:
        fitting = [op for op in OPERATIONS.values() if op.fits(world)]
        following = _named(fitting, OPERATIONS[self._last].then if self._last else ())
        changing = list[Operation]()
        if world.has_replayed:  # what a feature's CUDA graph has frozen may be changed now
            for name in _begun(world):
                then = _named(fitting, OPERATIONS[name].then)
                changing += [op for op in then if not op.restores]
        new = [op for op in fitting if not (op.restores or self._done[op.name])]
        if following and self._random.random() < _FOLLOWING:
            fitting = following
        elif world.has_replayed and new and self._random.random() < _NEW:
            fitting = new
        elif changing and self._random.random() < _CHANGING:
            fitting = changing
        elif world.compiles and not world.has_replayed and self._random.random() < _RESTORING:
            # Once more, since what can be captured is replayed then. Or something has to end.
            restoring = [op for op in fitting if op.restores]
            is_second = self._last == "again"
            fitting = [op for op in restoring if (op.name == "again") != is_second] or restoring
        return self._random.choices(fitting, [self._weight(op) for op in fitting])[0]

    def _weight(self, op: Operation) -> float:
        weight = op.weight * (_PREFERRED if op.group in self._preferred else 1)
        if not op.restores:  # what was done less often than others comes sooner
            mean = sum(self._done.values()) / len(OPERATIONS)
            weight *= (1 + mean) / (1 + self._done[op.name])
        return weight * (_REPEATED if op.name == self._last else 1)


def _begun(world: World) -> list[str]:
    """The operations whose effect lasts: features that are on, and a LoRA that is loaded."""
    return [*(f"{name}_on" for name in world.on), *(["lora_add"] if world.adapters else [])]


def _named(fitting: Sequence[Operation], names: Sequence[str]) -> list[Operation]:
    return [op for op in fitting if op.name in names]

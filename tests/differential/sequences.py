"""Sequences of operations: drawn from a seed, run, and cut down to what still fails."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from tests.differential import operations  # noqa: F401  (registers them)
from tests.differential.grammar import Grammar
from tests.differential.mismatches import Mismatch
from tests.differential.plants import PLANTS
from tests.differential.registry import OPERATIONS
from tests.differential.rounding import Excused
from tests.differential.stand_ins import known_programs, stand_ins
from tests.differential.world import TRANSFORMERS, UNETS, World, session_for

# Steps that are done whatever time they take: a new kind's program takes seconds to make.
_IN_ANY_CASE = 12
# Steps with one pair of models; then the next, so that what has gone wrong is forgotten.
_LEAST, _MOST = 25, 70


@dataclass(frozen=True)
class Step:
    """One operation, and the seed of its choices."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Step:
        """Parse the text that `str` made."""
        name, _, seed = text.partition(":")
        return cls(name, int(seed or 0))


class Ended(NamedTuple):
    """One sequence that was run: of which model, and the seconds until its graphs were there and
    altogether."""

    model: str
    steps: int
    ready_s: float
    seconds: float


@dataclass
class Counts:
    """The operations so far.

    Args:
        steps, operations, graph_calls, replays: How many.
        excused: Errors that passed as rounding.
        both_raised: Comparisons without a picture, because both raised the same.
        sequences: Those that have ended.
    """

    steps: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    graph_calls: int = 0
    replays: int = 0
    excused: list[Excused] = field(default_factory=list)
    both_raised: int = 0
    sequences: list[Ended] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """A sequence that shows a mismatch.

    Args:
        world: The seed of its models.
        steps: From the first operation to the last.
        mismatch: What differs after the last one.
        programs: Those that were there at its start. They decide what is drawn with graphs: a block
            that cannot be exported while a patch is on has its graph if its program is known.
    """

    world: int
    steps: tuple[Step, ...]
    mismatch: Mismatch
    programs: Mapping[str, bytes] = field(default_factory=dict, repr=False)


class Driver:
    """Runs sequences on one device.

    Args:
        device: "cpu" or "cuda".
        compiled: False has two eager pipelines, to try the operations.
        plant: The name of a fault to be put back.
        store: A folder of graphs for all sequences; None gives each sequence its own. With a real
            compiler, a sequence waits for graphs that are not there.
        model, dtype: As `World` takes them.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        compiled: bool = True,
        plant: str | None = None,
        store: Path | None = None,
        model: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.device, self.compiled, self.plant = device, compiled, plant
        self.store, self.model, self.dtype = store, model, dtype
        self.counts = Counts()

    def fill(self, limit_s: float = 240.0) -> int:
        """Build the graphs of all models into the store at the same time, for so long at most.

        Returns:
            How many kinds have their graph.
        """
        assert self.store is not None
        device = torch.device(self.device)
        with stand_ins(self.device) as figures, ExitStack() as stack:
            session = session_for(device, self.store, {})
            stack.callback(session.close)
            for model in [self.model] if self.model else [*UNETS, *TRANSFORMERS]:
                world = figures.world = World(
                    *(self.device, self.store, Random(0)),
                    compiled=False,
                    model=model,
                    dtype=self.dtype,
                )
                stack.callback(world.close)
                compile_pipe(world.pipe, session=session, ignores=["vae"])
                stack.callback(undo_compile, world.pipe)
                for _ in range(2):
                    world.compare()
            session.background.wait(limit_s)
            return sum(kind.graph is not None for kind in session.kinds)

    def random_run(
        self,
        seed: int,
        steps: int,
        seconds: float = math.inf,
        listen: Callable[[Ended], None] | None = None,
    ) -> Iterator[Found]:
        """Random sequences of so many steps in all, or for so long once the first graphs are
        there; what went wrong, uncut. `listen` hears of each sequence's end."""
        random, end = Random(seed), math.inf

        def is_time() -> bool:
            return self.counts.steps < _IN_ANY_CASE or time.monotonic() < end

        while self.counts.steps < steps and is_time():
            world_seed = random.randrange(2**32)
            most = min(random.randint(_LEAST, _MOST), steps - self.counts.steps)
            choices = Random(random.randrange(2**32))
            grammar = Grammar(choices, self.counts.operations)
            done: list[Step] = []
            began, programs = time.monotonic(), known_programs()
            with self._world(world_seed, end, programs) as (world, mismatch):
                ready = time.monotonic()
                end = min(end, ready + seconds)
                while mismatch is None and len(done) < most and is_time():
                    step = Step(grammar.next(world).name, choices.randrange(2**20))
                    done.append(step)
                    mismatch = self._step(world, step)
            now = time.monotonic()
            ended = Ended(world.model, len(done), round(ready - began, 1), round(now - began, 1))
            self.counts.sequences.append(ended)
            if listen is not None:
                listen(ended)
            if mismatch is not None:
                yield Found(world_seed, tuple(done), mismatch, programs)
                if mismatch.what == "device":
                    return

    def run(
        self,
        world_seed: int,
        steps: Sequence[Step],
        seconds: float = math.inf,
        listen: Callable[[Step], None] | None = None,
        programs: Mapping[str, bytes] | None = None,
    ) -> Found | None:
        """Given steps, those left out that do not fit; where it went wrong, if it did.

        No step begins after so many seconds. `listen` hears of each step that was done. `programs`
        are those that are there at its start, None for all that are known.
        """
        programs = known_programs() if programs is None else programs
        done: list[Step] = []
        end = time.monotonic() + seconds
        with self._world(world_seed, programs=programs) as (world, mismatch):
            for step in steps:
                if mismatch is not None or time.monotonic() >= end:
                    break
                if OPERATIONS[step.name].fits(world):
                    done.append(step)
                    mismatch = self._step(world, step)
                    if listen is not None:
                        listen(step)
        return None if mismatch is None else Found(world_seed, tuple(done), mismatch, programs)

    def is_planted(self, found: Found) -> bool:
        """Whether a sequence shows the planted fault: nothing differs without it, with the
        same programs at the start."""
        plain = Driver(
            self.device,
            compiled=self.compiled,
            store=self.store,
            model=self.model,
            dtype=self.dtype,
        )
        return plain.run(found.world, found.steps, programs=found.programs) is None

    def shortest(self, found: Found, seconds: float) -> Found:
        """Leave out steps for as long as it still goes wrong, in so much time at most."""
        end = time.monotonic() + seconds
        counts, self.counts = self.counts, Counts()
        size = max(1, len(found.steps) // 2)
        while True:
            at, shorter = 0, False
            while at < len(found.steps) and time.monotonic() < end:
                rest = found.steps[:at] + found.steps[at + size :]
                less = self.run(found.world, rest, programs=found.programs)
                if less is not None and len(less.steps) < len(found.steps):
                    found, shorter = less, True
                else:
                    at += size
            if time.monotonic() >= end or (size == 1 and not shorter):
                break
            size = max(1, size // 2)
        self.counts = counts
        return found

    def _settle(self, world: World, end: float) -> Mismatch | None:
        """Draw until graphs are built, compared and captured, or it is time."""
        for _ in range(2):
            mismatch = world.compare()
            if mismatch is not None:
                return mismatch
        limit_s = min(240.0, max(10.0, end - time.monotonic()))
        return None if not world.on_gpu else world.settle(limit_s)

    def _step(self, world: World, step: Step) -> Mismatch | None:
        self.counts.steps += 1
        self.counts.operations[step.name] += 1
        try:
            OPERATIONS[step.name].apply(world, Random(step.seed))
        except Exception as exc:
            return Mismatch("operation", 0.0, f"{type(exc).__name__}: {exc}"[:400])
        return world.compare()

    @contextmanager
    def _world(
        self, seed: int, end: float = math.inf, programs: Mapping[str, bytes] | None = None
    ) -> Iterator[tuple[World, Mismatch | None]]:
        """Models whose graphs are in use, and what went wrong until then."""
        with (
            tempfile.TemporaryDirectory(prefix="onediff-differential-") as folder,
            stand_ins(self.device, programs) as figures,
            PLANTS[self.plant]() if self.plant else nullcontext(),
        ):
            store = self.store or Path(folder)
            world = World(
                *(self.device, store, Random(seed)),
                compiled=self.compiled,
                model=self.model,
                dtype=self.dtype,
            )
            figures.world = world
            try:
                mismatch = self._settle(world, end)
                yield world, mismatch
            finally:
                world.close()
                self.counts.graph_calls += figures.graph_calls
                self.counts.replays += world.replays
                self.counts.excused += world.excused
                self.counts.both_raised += world.both_raised


def as_json(counts: Counts, found: Sequence[Found], **more: Any) -> dict[str, Any]:
    """A report."""
    return {
        **more,
        "steps": counts.steps,
        "kinds_of_operation": len(OPERATIONS),
        "operations": dict(sorted(counts.operations.items())),
        "graph_calls": counts.graph_calls,
        "replays": counts.replays,
        "both_raised": counts.both_raised,
        "sequences": [each._asdict() for each in counts.sequences],
        "excused_as_rounding": [
            {"error": each.error, "own": each.own, "dtype": str(each.dtype)}
            for each in counts.excused
        ],
        "mismatches": [
            {
                "what": each.mismatch.what,
                "error": None
                if each.mismatch.error != each.mismatch.error
                else each.mismatch.error,
                "text": each.mismatch.text,
                "world": each.world,
                "sequence": [str(step) for step in each.steps],
            }
            for each in found
        ],
    }

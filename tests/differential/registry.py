"""The kinds of operation: each has a name, a precondition, and acts on pipeline and twin alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.differential.world import World

Apply = Callable[["World", Random], None]
Undo = Callable[[], None]
Test = Callable[["World"], bool]


@dataclass(frozen=True)
class Operation:
    """One kind of operation.

    Args:
        name: In reports, and in sequences.
        apply: Does it; further choices are the generator's.
        fits: Whether it can be done now.
        weight: How often it is drawn, beside others.
        group: The Python module that defines it.
        restores: Whether CUDA graphs may be replayed again after it: a feature is off, or time
            passes.
        then: Operations that often come next: what they do depends on this one, or shows it.
    """

    name: str
    apply: Apply
    fits: Test
    weight: float = 1.0
    group: str = ""
    restores: bool = False
    then: tuple[str, ...] = ()


OPERATIONS: dict[str, Operation] = {}
# Features that are on at the same time, beyond which everything would run eager.
MOST_ON = 3


def always(world: World) -> bool:
    """The precondition of what can be done at any time."""
    return True


def _add(operation: Operation) -> None:
    assert operation.name not in OPERATIONS, operation.name
    OPERATIONS[operation.name] = operation


def operation(
    fits: Test = always,
    weight: float = 1.0,
    *,
    restores: bool = False,
    then: tuple[str, ...] = (),
) -> Callable[[Apply], Apply]:
    """Register a function under its name, as something that is done once."""

    def register(apply: Apply) -> Apply:
        _add(Operation(apply.__name__, apply, fits, weight, apply.__module__, restores, then))
        return apply

    return register


def feature(
    fits: Test = always, weight: float = 1.0, *, then: tuple[str, ...] = ()
) -> Callable[[Callable[[World, Random], Undo]], None]:
    """Register a function as something that is switched on, and off by what it returns.

    `then` holds what often comes after it was switched on, and while it is on.
    """

    def register(switch_on: Callable[[World, Random], Undo]) -> None:
        name = switch_on.__name__

        def on(world: World, random: Random) -> None:
            world.on[name] = switch_on(world, random)

        def off(world: World, random: Random) -> None:
            world.on.pop(name)()

        _add(
            Operation(
                f"{name}_on",
                on,
                lambda w: name not in w.on and len(w.on) < MOST_ON and fits(w),
                weight,
                switch_on.__module__,
                then=then,
            )
        )
        group = switch_on.__module__
        _add(Operation(f"{name}_off", off, lambda w: name in w.on, 4 * weight, group, True))

    return register

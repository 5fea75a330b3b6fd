"""The queue of a run: every picture once, whatever dies."""

from __future__ import annotations

import random

import pytest

from onediff_ext.cluster.batch_queue import MOST_DEATHS, BatchQueue, Poisoned, Unit


def drain(queue: BatchQueue, worker: str = "w", idle: bool = True) -> list[Unit]:
    units = []
    while (unit := queue.take(worker, idle=idle)) is not None:
        units.append(unit)
    return units


def test_batches_are_those_of_the_plan_and_stay_together() -> None:
    queue = BatchQueue([5, 2], [2, 2])
    assert [(u.group, u.batch, u.positions) for u in drain(queue)] == [
        (0, 0, (0, 1)),
        (0, 1, (0, 1)),
        (0, 2, (0,)),
        (1, 0, (0, 1)),
    ]


def test_workers_take_different_groups_and_stay_in_theirs() -> None:
    queue = BatchQueue([8, 8], [2, 2])
    first, second = queue.take("a", idle=True), queue.take("b", idle=True)
    assert first is not None
    assert second is not None
    assert first.group != second.group
    again = queue.take("a", idle=False)
    assert again is not None
    assert again.group == first.group


def test_a_run_ends_when_all_units_are_done() -> None:
    queue = BatchQueue([3, 0], [2, 2])
    for unit in drain(queue):
        assert not queue.is_finished
        queue.done(unit)
    assert queue.is_finished
    assert BatchQueue([], []).is_finished


def test_a_unit_that_was_given_back_is_handed_out_again_with_no_blame() -> None:
    queue = BatchQueue([2], [2])
    [unit] = drain(queue)
    queue.give_back(unit)
    assert drain(queue, "other") == [unit]


def test_a_suspect_is_drawn_alone_by_an_idle_worker() -> None:
    queue = BatchQueue([2], [2])
    [unit] = drain(queue)
    assert queue.killed(unit) == []
    assert queue.take("busy", idle=False) is None
    [again] = drain(queue)
    assert again.alone
    assert again.positions == unit.positions
    queue.done(again)
    assert queue.is_finished


def run_with(queue: BatchQueue, fatal: set[tuple[int, int, int]], limit: int = 500):
    """Draw everything with one worker after the other; returns (written, poisoned, deaths)."""
    written: list[tuple[int, int, int]] = []
    poisoned: list[Poisoned] = []
    deaths = 0
    for _ in range(limit):
        if queue.is_finished:
            return written, poisoned, deaths
        unit = queue.take("w", idle=True)
        assert unit is not None
        places = [(unit.group, unit.batch, position) for position in unit.positions]
        if fatal.intersection(places):
            deaths += 1
            poisoned += queue.killed(unit)
        else:
            if unit.writes:
                written += places
            queue.done(unit)
    raise AssertionError("the run does not end")


def test_a_poisoned_picture_is_found_and_the_rest_of_its_batch_is_drawn_together() -> None:
    queue = BatchQueue([9], [4])
    written, poisoned, deaths = run_with(queue, {(0, 1, 2)})
    assert poisoned == [Poisoned(0, 1, 2)]
    assert sorted(written) == [(0, b, p) for b in range(3) for p in range(4 if b < 2 else 1)
                               if (b, p) != (1, 2)]  # fmt: skip
    assert len(written) == len(set(written))
    assert deaths == 2 + MOST_DEATHS


def test_a_batch_of_one_poisoned_picture_ends() -> None:
    written, poisoned, deaths = run_with(BatchQueue([1], [4]), {(0, 0, 0)})
    assert (written, poisoned, deaths) == ([], [Poisoned(0, 0, 0)], 1 + MOST_DEATHS)


def test_pictures_that_kill_only_together_are_drawn_one_by_one() -> None:
    queue = BatchQueue([2], [2])
    written = []
    for _ in range(100):
        if queue.is_finished:
            break
        unit = queue.take("w", idle=True)
        assert unit is not None
        if len(unit.positions) == 2:
            assert queue.killed(unit) == []
        else:
            written += list(unit.positions) * unit.writes
            queue.done(unit)
    assert queue.is_finished
    assert sorted(written) == [0, 1]


@pytest.mark.parametrize("seed", range(40))
def test_each_picture_is_written_once_or_poisoned_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randrange(0, 12) for _ in range(4)]
    batches = [chance.randrange(1, 5) for _ in sizes]
    queue = BatchQueue(sizes, batches)
    everything = {
        (g, b, p)
        for g, (size, most) in enumerate(zip(sizes, batches, strict=True))
        for b in range(-(-size // most))
        for p in range(min(most, size - b * most))
    }
    fatal = {place for place in everything if chance.random() < 0.08}
    written: list[tuple[int, int, int]] = []
    poisoned: set[tuple[int, int, int]] = set()
    held: dict[str, list[Unit]] = {f"w{n}": [] for n in range(3)}
    for _ in range(5000):
        if queue.is_finished:
            break
        worker = chance.choice(list(held))
        units = held[worker]
        roll = chance.random()
        if roll < 0.5 and len(units) < 3 and not any(u.alone for u in units):
            unit = queue.take(worker, idle=not units)
            if unit is not None:
                units.append(unit)
        elif units and roll < 0.55:
            queue.give_back(units.pop())
        elif units:
            unit = units[0]
            places = [(unit.group, unit.batch, position) for position in unit.positions]
            if fatal.intersection(places):
                queue.forget(worker)
                for lost in units:
                    poisoned |= {(p.group, p.batch, p.position) for p in queue.killed(lost)}
                units.clear()
            else:
                written += places * unit.writes
                queue.done(units.pop(0))
    assert queue.is_finished
    assert len(written) == len(set(written))
    assert set(written) | poisoned == everything
    assert poisoned == fatal

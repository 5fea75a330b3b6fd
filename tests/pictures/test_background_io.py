"""Reading and writing beside the drawing: order, how much at once, and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from onediff_ext.pictures.background_io import Writing, read_ahead

WAIT_S = 20


def test_items_come_in_order_and_the_next_one_is_made_meanwhile() -> None:
    made = [threading.Event() for _ in range(4)]

    def items() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    found = []
    for number in read_ahead(items()):
        found.append(number)
        assert all(event.wait(WAIT_S) for event in made[: number + 2])
        assert not any(event.is_set() for event in made[number + 2 :])
    assert found == [0, 1, 2, 3]


def test_what_an_item_raises_arrives_after_those_before_it() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("broken")

    ahead = read_ahead(items())
    assert next(ahead) == 0
    with pytest.raises(ValueError, match="broken"):
        next(ahead)


def test_jobs_are_done_beside_and_in_order() -> None:
    go_on, done = threading.Event(), []
    with Writing(limit=3) as writing:
        writing.put(lambda: done.append(go_on.wait(WAIT_S)))
        writing.put(lambda: done.append("second"))
        assert done == []
        go_on.set()
    assert done == [True, "second"]


def test_no_more_than_the_limit_waits() -> None:
    go_on, two, queued = threading.Event(), threading.Event(), []

    def put_all() -> None:
        with Writing(limit=2) as writing:
            for number in range(3):
                writing.put(lambda: go_on.wait(WAIT_S) and None)
                queued.append(number)
                if number == 1:
                    two.set()

    thread = threading.Thread(target=put_all)
    thread.start()
    assert two.wait(WAIT_S)
    thread.join(0.3)
    assert queued == [0, 1]
    go_on.set()
    thread.join(WAIT_S)
    assert queued == [0, 1, 2]


def fail() -> None:
    raise ValueError("disk full")


def test_an_error_ends_all_that_follows_and_reaches_the_caller() -> None:
    done: list[int] = []

    def put_all() -> None:
        with Writing(limit=1) as writing:
            writing.put(fail)
            for number in range(3):
                writing.put(partial(done.append, number))

    with pytest.raises(ValueError, match="disk full"):
        put_all()
    assert done == []


def test_what_waits_behind_an_error_is_not_done() -> None:
    go_on, done = threading.Event(), []

    def fail_late() -> None:
        go_on.wait(WAIT_S)
        fail()

    def put_all() -> None:
        with Writing(limit=2) as writing:
            writing.put(fail_late)
            writing.put(lambda: done.append("second"))
            go_on.set()

    with pytest.raises(ValueError, match="disk full"):
        put_all()
    assert done == []


def test_an_error_of_the_last_job_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="disk full"), Writing() as writing:
        writing.put(fail)


def test_what_is_queued_is_done_when_the_block_is_interrupted() -> None:
    go_on, done = threading.Event(), []

    def interrupted() -> None:
        with Writing(limit=2) as writing:
            writing.put(lambda: done.append(go_on.wait(WAIT_S)))
            writing.put(lambda: done.append("second"))
            go_on.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [True, "second"]


def test_the_blocks_own_error_is_the_one_that_is_raised() -> None:
    def interrupted() -> None:
        with Writing() as writing:
            writing.put(fail)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

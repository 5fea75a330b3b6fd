"""Garbage collection pauses while a process starts, and skips those objects afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from onediff_ext.core import garbage_collection
from onediff_ext.core.garbage_collection import without_collection


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a program that froze nothing; the test run itself has, and says so."""
    monkeypatch.setattr(garbage_collection, "gc", gc)
    gc.unfreeze()
    yield
    gc.freeze()


def test_nothing_is_collected_within_and_all_is_old_afterwards() -> None:
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            made = [[] for _ in range(5000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    young = {id(found) for generation in (0, 1) for found in gc.get_objects(generation)}
    assert young.isdisjoint(map(id, made))
    assert gc.get_freeze_count() == 0


def test_garbage_of_the_block_can_be_collected_later() -> None:
    class Node:
        alive = 0

        def __init__(self) -> None:
            self.own, Node.alive = self, Node.alive + 1

        def __del__(self) -> None:
            Node.alive -= 1

    with without_collection():
        Node()
    gc.collect()
    assert Node.alive == 0


def test_what_somebody_froze_stays_frozen() -> None:
    made = [[] for _ in range(5000)]
    gc.freeze()
    with without_collection():
        pass
    assert {id(found) for found in gc.get_objects()}.isdisjoint(map(id, made))
    assert gc.isenabled()


def test_it_lasts_until_the_last_thread_is_through() -> None:
    entered, leave = threading.Event(), threading.Event()

    def read() -> None:
        with without_collection():
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=read)
    with without_collection():
        thread.start()
        assert entered.wait(20)
    assert not gc.isenabled()
    leave.set()
    thread.join(20)
    assert gc.isenabled()


def test_an_error_ends_it_too() -> None:
    with pytest.raises(ValueError, match="wrong"), without_collection():
        raise ValueError("wrong")
    assert gc.isenabled()


def test_collection_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

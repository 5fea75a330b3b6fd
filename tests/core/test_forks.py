"""A forked process is free of what threads held and did that it does not have."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from onediff_ext.core.forks import ThreadCounts, fork_safe_condition, fork_safe_lock
from onediff_ext.core.garbage_collection import without_collection
from onediff_ext.core.priority import quick_switches
from tests.support.forked_child import in_another_thread, passes_in_child
from tests.support.systems import needs_fork

pytestmark = needs_fork


def acquire(lock: Any) -> None:
    with lock:
        pass


@pytest.mark.parametrize("make", [fork_safe_lock, fork_safe_condition])
def test_a_lock_of_another_thread_is_free_in_the_child_only(make: Callable[[], Any]) -> None:
    lock = make()
    with in_another_thread(lock):
        assert passes_in_child(lambda: acquire(lock))
        assert not lock.acquire(blocking=False)
    acquire(lock)


def test_the_test_sees_a_lock_that_stays_held() -> None:
    lock = threading.RLock()
    with in_another_thread(lock):
        assert not passes_in_child(lambda: acquire(lock), limit_s=1)


@pytest.mark.parametrize("make", [fork_safe_lock, fork_safe_condition])
def test_the_forking_thread_keeps_its_lock(make: Callable[[], Any]) -> None:
    lock = make()
    tried = []

    def work() -> None:
        thread = threading.Thread(target=lambda: tried.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        assert tried == [False]
        lock.release()
        acquire(lock)

    lock.acquire()
    try:
        assert passes_in_child(work)
    finally:
        lock.release()


def test_collection_and_switches_are_as_usual_in_the_child() -> None:
    usual_s = sys.getswitchinterval()
    assert gc.isenabled()

    def work() -> None:
        assert gc.isenabled()
        assert sys.getswitchinterval() == usual_s

    with in_another_thread(without_collection()), in_another_thread(quick_switches()):
        assert not gc.isenabled()
        assert sys.getswitchinterval() < usual_s
        assert passes_in_child(work)
        assert not gc.isenabled()


def test_what_the_forking_thread_wants_goes_on_in_the_child() -> None:
    usual_s = sys.getswitchinterval()

    def work() -> None:
        assert not gc.isenabled()
        assert sys.getswitchinterval() < usual_s
        pause.__exit__(None, None, None)
        quick.__exit__(None, None, None)
        assert gc.isenabled()
        assert sys.getswitchinterval() == usual_s

    with in_another_thread(without_collection()), in_another_thread(quick_switches()):
        pause, quick = without_collection(), quick_switches()
        with pause, quick:
            assert passes_in_child(work)


def test_counts_of_threads() -> None:
    counts = ThreadCounts()
    assert not counts
    counts.enter()
    counts.enter()
    thread = threading.Thread(target=counts.enter)
    thread.start()
    thread.join()
    assert counts.total() == 3
    counts.forget_other_threads()
    assert counts == {threading.get_ident(): 2}
    counts.leave()
    counts.leave()
    assert not counts

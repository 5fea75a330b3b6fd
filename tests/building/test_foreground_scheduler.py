"""The gate: other work costs pictures little, and gets its turn even when they never stop."""

from __future__ import annotations

import statistics
import threading
import time

from onediff_ext.building.foreground_scheduler import GAP_TURN_S, ForegroundScheduler


def draw(foreground: ForegroundScheduler, seconds: float) -> float:
    """One picture; returns how long it had to wait before it could begin."""
    start = time.monotonic()
    with foreground.picture():
        waited = time.monotonic() - start
        time.sleep(seconds)
    return waited


def work(
    foreground: ForegroundScheduler, cost_s: float, turns: int, done: list[float]
) -> threading.Thread:
    def run() -> None:
        for _ in range(turns):
            with foreground.turn(cost_s):
                time.sleep(cost_s)
                done.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_between_endless_pictures_work_gets_what_was_saved_up() -> None:
    foreground, done = ForegroundScheduler(), list[float]()
    draw(foreground, 0.3)  # 0.03 s are saved up
    thread = work(foreground, 0.025, 4, done)
    waits = [draw(foreground, 0.3) for _ in range(8)]
    thread.join(5)
    assert len(done) == 4
    assert max(waits) < 0.15


def test_a_picture_waits_for_no_more_than_is_allowed() -> None:
    foreground, done = ForegroundScheduler(), list[float]()
    draw(foreground, 0.1)
    thread = work(foreground, GAP_TURN_S, 1, done)  # more than was saved up
    assert max(draw(foreground, 0.1) for _ in range(3)) < 0.1
    assert not done
    thread.join(5)  # nobody draws: now it may
    assert done


def test_nobody_waits_when_there_is_no_other_work() -> None:
    foreground = ForegroundScheduler()
    assert statistics.median(draw(foreground, 0.02) for _ in range(5)) < 0.02


def test_what_must_run_alone_has_one_turn_between_two_pictures() -> None:
    foreground, done = ForegroundScheduler(), list[float]()

    def run() -> None:
        for _ in range(3):
            with foreground.turn(0.4, alone=True):
                time.sleep(0.05)
                done.append(time.monotonic())

    with foreground.picture():
        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.1)
    counts = []
    for _ in range(4):
        draw(foreground, 0.1)
        counts.append(len(done))
    thread.join(5)
    assert counts[:3] == [1, 2, 3]

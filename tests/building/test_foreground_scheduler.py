"""The foreground scheduler: other work delays pictures little, and gets turns between them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import pytest
import torch

from onediff_ext.building.foreground_scheduler import GAP_TURN_S, QUIET_S, ForegroundScheduler
from onediff_ext.building.picture_clock import ModelCall
from onediff_ext.core.components import ComponentId, Role


def draw(foreground: ForegroundScheduler, seconds: float) -> float:
    """Draw one picture; return how long it waited before it began."""
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


def test_a_picture_with_new_graphs_waits_for_no_other_work() -> None:
    foreground, done = ForegroundScheduler(), list[float]()
    with foreground.picture():
        foreground.between_pictures(lambda: None)
        time.sleep(0.3)
        thread = work(foreground, 0.025, 1, done)
    with foreground.picture():
        assert not done
        time.sleep(0.3)
    draw(foreground, 0.3)
    thread.join(5)
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


class Bare:
    """A UNet in a user's own loop, with a clock of the test's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.foreground = ForegroundScheduler(lambda: self.seconds)
        self.begin()

    def begin(self, side: int = 8) -> None:
        """As `set_timesteps` of a scheduler does."""
        self.left, self.shape = list(torch.linspace(999, 1, 10)), (2, 4, side, side)

    def step(self, within: Callable[[], None] = lambda: None) -> int:
        """One forward, a tenth of a second long; returns the epoch."""
        call = ModelCall(ComponentId(Role.UNET), 1, (self.shape,), self.left.pop(0))
        with self.foreground.forward(lambda: call):
            self.seconds += 0.1
            within()
            epoch = self.foreground.epoch
        self.seconds += 0.01
        return epoch


@pytest.fixture
def bare() -> Bare:
    return Bare()


def test_steps_of_a_bare_module_are_one_picture(bare: Bare) -> None:
    epochs = set()
    for side in (8, 8, 9):
        bare.begin(side)
        epochs.add(frozenset(bare.step() for _ in range(5)))
    assert [len(epoch) for epoch in epochs] == [1, 1, 1]
    assert bare.foreground.pictures_begun == 3


def test_a_silence_ends_the_picture_of_a_bare_module(bare: Bare) -> None:
    before = bare.step()
    assert bare.foreground.is_drawing
    bare.seconds += QUIET_S
    assert not bare.foreground.is_drawing
    assert bare.step() > before


def test_graphs_change_between_the_pictures_of_a_bare_module(bare: Bare) -> None:
    changes: list[str] = []
    bare.step()
    bare.foreground.between_pictures(lambda: changes.append("next picture"))
    bare.step()
    assert not changes
    bare.begin()
    bare.step(lambda: changes.append("its first step"))
    assert changes == ["next picture", "its first step"]
    bare.foreground.between_pictures(lambda: changes.append("silence"))
    assert len(changes) == 2
    bare.seconds += QUIET_S
    bare.foreground.let_picture_end(0, threading.Event())
    assert changes[2:] == ["silence"]


def test_a_picture_is_announced_once_however_deep(bare: Bare) -> None:
    foreground = bare.foreground
    with foreground.picture():
        epoch = foreground.epoch
        with pytest.raises(KeyError), foreground.picture():
            raise KeyError
        bare.step()
        bare.begin(9)  # another model's schedule, in the picture of a pipeline
        assert bare.step() == epoch
    assert foreground.pictures_begun == 1
    assert bare.step() == epoch + 1  # not the pipeline's any more


def test_pictures_of_two_threads_look_at_the_weights_each(bare: Bare) -> None:
    foreground, seen = bare.foreground, []

    def draw() -> None:
        for _ in range(2):
            with foreground.picture():
                seen.append(foreground.epoch)
        seen.append(bare.step())

    with foreground.picture():
        first = foreground.epoch
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
    assert seen == [first + 1, first + 2, first + 3]
    assert not foreground._announced


def test_a_picture_may_be_ended_by_another_thread(bare: Bare) -> None:
    bare.foreground.begin_picture()
    thread = threading.Thread(target=bare.foreground.end_picture)
    thread.start()
    thread.join()
    bare.seconds += QUIET_S
    assert not bare.foreground.is_drawing


class Alone:
    """Work that must run alone, in a thread of its own.

    Args:
        bare: Its foreground grants the turns, and its clock shows the time that they take.
        turns: How many it takes.
    """

    def __init__(self, bare: Bare, turns: int) -> None:
        self._bare, self._turns = bare, turns
        self.stop, self.is_working, self.done = threading.Event(), False, 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        while not bare.foreground._wanted and self._thread.is_alive():
            time.sleep(0.001)

    def _run(self) -> None:
        for _ in range(self._turns):
            with self._bare.foreground.turn(0.4, alone=True, stop=self.stop) as granted:
                if not granted:
                    return
                self.is_working = True
                time.sleep(0.05)
                self._bare.seconds += 0.4
                self.is_working = False
                self.done += 1

    def end(self) -> None:
        self.stop.set()
        self._thread.join(5)
        assert not self._thread.is_alive()


def test_a_picture_halts_between_two_steps_for_what_it_has_earned(bare: Bare) -> None:
    foreground = bare.foreground
    with foreground.picture():
        work, counts = Alone(bare, 9), []
        for _ in range(330):  # of a tenth of a second: 4% of them are enough for three turns
            bare.begin()
            bare.step(lambda: counts.append((work.done, work.is_working)))
        work.end()
    assert {is_working for _, is_working in counts} == {False}
    steps = [sum(done == turns for done, _ in counts) for turns in range(4)]
    assert all(80 < count < 120 for count in steps[:3]), steps
    assert counts[-1][0] == 3


def test_a_step_waits_for_one_turn_only(bare: Bare) -> None:
    with bare.foreground.picture():
        bare.seconds += 1000  # enough for a hundred turns
        work, counts = Alone(bare, 9), []
        for _ in range(4):
            bare.step(lambda: counts.append(work.done))
        work.end()
    assert counts == [1, 2, 3, 4]


def test_a_bare_module_halts_too_and_its_picture_goes_on(bare: Bare) -> None:
    changes: list[str] = []
    epochs = {bare.step()}
    bare.seconds += QUIET_S / 2
    bare.foreground._drawn_s = 1000.0
    bare.foreground.between_pictures(lambda: changes.append("next picture"))
    work = Alone(bare, 1)
    turn = bare.foreground._may_take

    def late(wanted: object) -> bool:
        bare.seconds += QUIET_S  # the halt is no silence that ends the picture
        return turn(wanted)  # type: ignore[arg-type]

    bare.foreground._may_take = late  # type: ignore[method-assign,assignment]
    epochs.add(bare.step())
    work.end()
    assert (work.done, len(epochs), changes) == (1, 1, [])


def test_nobody_halts_where_two_threads_draw(bare: Bare) -> None:
    foreground = bare.foreground
    with foreground.picture():
        other = threading.Thread(target=lambda: bare.step())
        other.start()
        other.join()
        bare.seconds += 1000
        work = Alone(bare, 1)
        bare.step()
        assert not work.done
        work.end()


def test_an_announced_forward_is_not_asked_for_its_picture() -> None:
    foreground = ForegroundScheduler()
    with foreground.picture(), foreground.forward(lambda: pytest.fail("it was announced")):
        assert foreground.pictures_begun == 1


def test_nobody_halts_within_a_step(bare: Bare) -> None:
    """A ControlNet's forward within another model's."""
    foreground = bare.foreground
    with foreground.picture(), foreground.forward():
        bare.seconds += 1000
        work = Alone(bare, 1)
        bare.step()
        assert not work.done
        work.end()


def test_another_thread_begins_no_step_in_a_halt(bare: Bare) -> None:
    foreground, seen = bare.foreground, []
    with foreground.picture():
        bare.seconds += 1000
        work = Alone(bare, 1)

        def step() -> None:
            while not work.is_working and not work.done:
                time.sleep(0.001)
            with foreground.forward():
                seen.append(work.is_working)

        other = threading.Thread(target=step)
        other.start()
        bare.step()
        other.join()
        work.end()
    assert seen == [False]

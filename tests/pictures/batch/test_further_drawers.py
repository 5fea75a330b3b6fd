"""Runs that several drawers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onediff_ext.pictures.batch.batch_drawer import (
    BatchToDraw,
    DrawerLostError,
    DrawnBatch,
    FurtherDrawer,
)
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.batch.planning import Plan, plan_batch
from onediff_ext.pictures.batch.run_batches import run_batches
from onediff_ext.pictures.size_rules import OwnSize
from onediff_ext.pictures.skipped import SkipReport
from tests.support.batch_drawers import InvertingDrawer
from tests.support.sample_pictures import save_pictures

NAMES = [f"p{number:02}" for number in range(12)]
_WAIT_S = 20.0


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    """Twelve images of two canvas sizes, one at once."""
    sizes = {name: (64, 64) if number % 3 else (72, 64) for number, name in enumerate(NAMES)}
    folder = save_pictures(tmp_path / "in", **sizes)
    return BatchJob([folder], tmp_path / "out", OwnSize(), seed=3, batch_size=1)


def plan(job: BatchJob) -> Plan:
    return plan_batch(job, lambda one: {"prompt": "a cat"}, SkipReport())


class Further(InvertingDrawer, FurtherDrawer[int]):
    """A further drawer.

    Args:
        opens: What `open` does, with `is_wanted`.
        before: Called before each batch, with their number so far.
    """

    def __init__(
        self,
        opens: Callable[[Callable[[], bool]], bool] = lambda is_wanted: True,
        before: Callable[[int], None] = lambda count: None,
    ) -> None:
        super().__init__()
        self._opens, self._before = opens, before
        self.lost: list[str] = []
        self.is_closed = False

    def open(self, is_wanted: Callable[[], bool]) -> bool:
        return self._opens(is_wanted)

    def draw(self, batch: BatchToDraw) -> Iterator[DrawnBatch[int]]:
        self._before(len(self.drawn))
        yield from super().draw(batch)

    def on_lost(self, exc: DrawerLostError) -> None:
        self.lost.append(str(exc))

    def close(self) -> None:
        self.is_closed = True


class Patient(InvertingDrawer):
    """Draws once the others have drawn something."""

    def __init__(self, may_draw: threading.Event) -> None:
        super().__init__()
        self._may_draw = may_draw

    def draw(self, batch: BatchToDraw) -> Iterator[DrawnBatch[int]]:
        assert self._may_draw.wait(_WAIT_S)
        yield from super().draw(batch)


def names(*drawers: InvertingDrawer) -> list[str]:
    return sorted(name for drawer in drawers for _, _, found in drawer.drawn for name in found)


def results(job: BatchJob) -> list[str]:
    return sorted(path.stem for path in job.output_dir.iterdir())


def test_each_image_is_drawn_once_by_one_of_them(job: BatchJob) -> None:
    drew = threading.Event()
    further = [Further(before=lambda count: drew.set()) for _ in range(2)]
    drawer = Patient(drew)
    run_batches(job, plan(job), drawer, SkipReport(), further)
    assert names(drawer, *further) == [f"{name}.png" for name in NAMES]
    assert sum(len(one.drawn) for one in further) > 0
    assert results(job) == NAMES
    for one in (drawer, *further):
        assert len(one.written) == len(one.drawn)
    assert all(one.is_closed and not one.lost for one in further)


@pytest.mark.parametrize("drawn_before", [0, 2])
def test_what_a_lost_drawer_had_is_drawn_by_the_others(job: BatchJob, drawn_before: int) -> None:
    lost = threading.Event()

    def before(count: int) -> None:
        if count == drawn_before:
            lost.set()
            raise DrawerLostError("its machine is gone")

    further, drawer = Further(before=before), Patient(lost)
    run_batches(job, plan(job), drawer, SkipReport(), [further])
    assert further.lost == ["its machine is gone"]
    assert further.is_closed
    assert len(further.drawn) == drawn_before
    assert names(drawer, further) == [f"{name}.png" for name in NAMES]
    assert results(job) == NAMES


def test_the_last_batch_is_waited_for_and_drawn_again(job: BatchJob) -> None:
    """The host has nothing left to do when the further drawer is lost with the last batch."""
    has_taken, drawer = threading.Event(), InvertingDrawer()

    def before(count: int) -> None:
        has_taken.set()
        while len(drawer.drawn) < len(NAMES) - 1:
            assert not threading.Event().wait(0.01)
        raise DrawerLostError("its machine is gone")

    def draw(batch: BatchToDraw) -> Iterator[DrawnBatch[int]]:
        assert has_taken.wait(_WAIT_S)
        return InvertingDrawer.draw(drawer, batch)

    drawer.draw = draw  # type: ignore[method-assign]
    run_batches(job, plan(job), drawer, SkipReport(), [Further(before=before)])
    assert results(job) == NAMES
    assert len(drawer.drawn) == len(NAMES)


def test_a_drawer_that_does_not_open_is_done_without(job: BatchJob) -> None:
    def opens(is_wanted: Callable[[], bool]) -> bool:
        raise DrawerLostError("it does not start")

    further, drawer = Further(opens), InvertingDrawer()
    run_batches(job, plan(job), drawer, SkipReport(), [further])
    assert further.lost == ["it does not start"]
    assert further.is_closed
    assert results(job) == NAMES


def test_nobody_waits_for_a_drawer_that_opens_slowly(job: BatchJob) -> None:
    def opens(is_wanted: Callable[[], bool]) -> bool:
        while is_wanted():
            assert not threading.Event().wait(0.01)
        return False

    further, drawer = Further(opens), InvertingDrawer()
    run_batches(job, plan(job), drawer, SkipReport(), [further])
    assert further.drawn == []
    assert further.is_closed
    assert results(job) == NAMES


def test_a_run_that_is_stopped_is_stopped_for_all(job: BatchJob) -> None:
    drew = threading.Event()

    def before(count: int) -> None:
        drew.set()

    further = Further(before=before)
    drawer = InvertingDrawer(is_stopped=lambda: drew.wait(_WAIT_S))
    run_batches(job, plan(job), drawer, SkipReport(), [further])
    assert drawer.drawn == []
    assert 0 < len(further.drawn) < len(NAMES)
    assert results(job) == [name.removesuffix(".png") for name in names(further)]


@pytest.mark.parametrize("fails", ["further", "host"])
def test_an_error_of_one_ends_the_run(job: BatchJob, fails: str) -> None:
    drew = threading.Event()

    def before(count: int) -> None:
        drew.set()
        if fails == "further":
            raise OSError("the disk is full")

    further, drawer = Further(before=before), InvertingDrawer()

    def draw(batch: BatchToDraw) -> Iterator[DrawnBatch[int]]:
        assert drew.wait(_WAIT_S)
        if fails == "host":
            raise OSError("the disk is full")
        threading.Event().wait(0.05)
        return InvertingDrawer.draw(drawer, batch)

    drawer.draw = draw  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is full"):
        run_batches(job, plan(job), drawer, SkipReport(), [further])
    assert further.is_closed
    assert len(list(job.output_dir.glob("*"))) < len(NAMES)

"""What graphs saved with a picture: an estimate where its size was measured, else no figure."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine import stopwatch
from onediff_ext.engine.machine import machine_digest
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.panel import html
from onediff_ext.panel.graph_rows import graph_groups
from onediff_ext.panel.header import header_of
from onediff_ext.panel.phrases import ENGLISH
from onediff_ext.session import picture_timer
from onediff_ext.session.picture_timer import PictureTimer
from onediff_ext.session.warm_up_report import SizeFigures, WarmUpReport
from onediff_ext.store import SavedTimes, StepRecord

TIMEOUT_S = 240
CHECKPOINT = "c" * 64
LATENT = torch.zeros(2, 4, 16, 24)  # 192x128, two for guidance


def measured(size="192x128", eager_ms=800.0, compiled_ms=200.0):
    return {size: StepRecord(CHECKPOINT, "machine", size, eager_ms, compiled_ms, 0.0)}


@pytest.fixture(autouse=True)
def clock_of_ours(monkeypatch):
    """A step takes the time that the test says, however busy the machine is."""
    now = [0.0]
    for module in (picture_timer, stopwatch):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.fixture
def timed(clock_of_ours):
    """Draws a picture of steps that take these seconds, and one second for the rest."""

    def draw(seconds, steps, latent=LATENT):
        clock = PictureTimer()
        clock.begin()
        for step_s in seconds:
            with clock.forward([None, latent]):
                clock_of_ours[0] += step_s
        clock_of_ours[0] += 1.0
        return clock.end(steps)

    return draw


def test_a_measured_size_has_an_estimate(timed):
    taken = timed([0.2, 0.2, 0.2], measured)
    assert taken.seconds == pytest.approx(1.6)
    assert taken.without_s == pytest.approx(1.0 + 3 * 0.8)


@pytest.mark.parametrize("step_s", [0.15, 0.25])
def test_an_estimate_agrees_with_the_measured_speed_up(timed, step_s):
    """The header said 1.1x, and below it stood "1.9 s, about 2.4 s without OneDiff"."""
    taken = timed([step_s] * 4, measured)
    assert taken.without_s - 1.0 == pytest.approx(4.0 * (taken.seconds - 1.0))


def test_comparisons_and_deepcache_count_as_the_time_they_take(timed):
    taken = timed([0.9, 0.2, 0.2, 0.05], measured)
    assert taken.without_s == pytest.approx(1.0 + 4 * 0.8)


@pytest.mark.parametrize("step_s", [0.31, 0.1])
def test_a_machine_that_is_busier_or_idler_than_when_it_was_measured_has_none(timed, step_s):
    """A picture of 70 s was "about 14 s without" while other programs took all cores."""
    taken = timed([step_s] * 4, measured)
    assert taken.without_s is None
    assert taken.other_pace
    assert not timed([0.2] * 4, measured).other_pace


@pytest.mark.parametrize(
    ("steps", "latent"),
    [
        (measured("128x192"), LATENT),
        ({}, LATENT),
        (measured(), torch.zeros(1, 4, 16, 24)),  # no guidance: another step
        (measured(), torch.zeros(2, 77, 8)),
    ],
)
def test_a_size_without_a_measurement_has_none(timed, steps, latent):
    taken = timed([0.2], lambda: steps, latent)
    assert taken.seconds > 0
    assert taken.without_s is None
    assert not taken.other_pace


def test_a_picture_without_graphs_has_none(timed):
    assert timed([0.2], None).without_s is None


def test_one_unmeasured_pass_of_a_picture_leaves_no_estimate():
    """Hires-fix draws a second pass at another size."""
    clock = PictureTimer()
    clock.begin()
    for latent in (LATENT, torch.zeros(2, 4, 32, 48)):
        with clock.forward([latent]):
            pass
    assert clock.end(measured).without_s is None


def test_a_picture_within_a_picture_counts_once():
    clock = PictureTimer()
    clock.begin()
    clock.begin()
    assert clock.end(None) is None
    assert clock.last is None
    assert clock.end(None) is clock.last


def test_an_interrupted_picture_has_no_time(timed):
    """A job that *stop* had ended said "Last picture: 0.1 s"."""
    clock = PictureTimer()
    clock.begin()
    clock.end(None)
    assert clock.last is not None
    clock.begin()
    clock.begin()  # a face restorer's
    with clock.forward([LATENT]):
        pass
    clock.interrupt()
    clock.end(measured)
    assert clock.end(measured) is None
    assert clock.last is None
    clock.interrupt()  # after its end
    clock.begin()
    assert clock.end(None) is clock.last is not None


def test_a_wait_in_the_first_step_does_not_count(monkeypatch):
    taken = iter([5.0, 0.2, 0.2, 0.3, 1.0])
    monkeypatch.setattr(picture_timer, "stopwatch", lambda _: lambda: partial(float, next(taken)))
    clock = PictureTimer()
    assert clock.steps_s == 0.0
    clock.begin()
    for latent in [LATENT] * 4 + [torch.zeros(2, 4, 32, 48)]:
        with clock.forward([latent]):
            pass
    clock.end(None)
    assert clock.steps_s == pytest.approx(4 * 0.25 + 1.0)
    clock.begin()
    clock.interrupt()
    clock.end(None)
    assert clock.steps_s == 0.0


def test_forwards_outside_pictures_are_not_counted():
    clock = PictureTimer()
    with clock.forward([LATENT]):
        pass
    clock.begin()
    assert clock.end(measured).without_s is None


@pytest.fixture
def ready(open_session, small, instant_workers, clock_of_ours, monkeypatch):
    """A small UNet whose graphs are all in use, with a checkpoint; a forward takes one second."""

    def forward(self, arguments):
        with own(self, arguments):
            yield
            clock_of_ours[0] += 1.0

    own = PictureTimer.forward
    monkeypatch.setattr(PictureTimer, "forward", contextmanager(forward))
    session = open_session()
    session.use_checkpoint(CHECKPOINT, name="small", architecture="sd1")
    compile_pipe(small.pipe, session=session)
    for _ in range(3):
        with session.picture():
            small()
        assert session.wait_for_builds(TIMEOUT_S)
    return session


def record_step(session, size, *, eager_ms, compiled_ms):
    """As a warm-up of this checkpoint and backend records it."""
    session.build_context.history.record_step(
        checkpoint=CHECKPOINT,
        machine=machine_digest(session.kinds[0].device),
        backend="eager",
        size=size,
        eager_ms=eager_ms,
        compiled_ms=compiled_ms,
    )


def saved(session):
    machine = machine_digest(session.kinds[0].device)
    return SavedTimes(session.library.folder).of(machine, CHECKPOINT)


def test_pictures_at_a_measured_size_add_up(ready, small):
    assert saved(ready) is None
    assert ready.status().picture_s > 0
    assert ready.status().without_s is None
    record_step(ready, "128x128", eager_ms=3000.0, compiled_ms=1000.0)
    for number in (1, 2):
        with ready.picture():
            small()
        status = ready.status()
        assert (status.picture_s, status.without_s) == (1.0, 3.0)
        assert saved(ready).pictures == number
    assert saved(ready).seconds == 4.0
    with ready.picture():
        small(24, 16)  # a size that nobody measured
    assert ready.status().without_s is None
    assert saved(ready).pictures == 2


def test_a_picture_that_ended_in_an_error_gives_no_figure(ready, small):
    record_step(ready, "128x128", eager_ms=3000.0, compiled_ms=1000.0)

    def interrupted():
        with ready.picture():
            small()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ready.status().picture_s is None
    assert saved(ready) is None


def test_eager_pictures_save_nothing(open_session, small):
    session = open_session(build="never")
    session.use_checkpoint(CHECKPOINT, name="small", architecture="sd1")
    compile_pipe(small.pipe, session=session)
    with session.picture():
        small()
    record_step(session, "128x128", eager_ms=3000.0, compiled_ms=1000.0)
    with session.picture():
        small()
    assert session.status().without_s is None
    assert saved(session) is None


def test_all_places_show_the_same_figure_for_one_size(ready, small):
    """Header, warm-up, graph library and status line said 1.2x, 1.3x and 1.4x for one size.

    They took the mean over different sets of sizes.
    """
    report = WarmUpReport()
    for shape, eager_ms in ((BatchShape(128, 128), 3000.0), (BatchShape(192, 128), 1200.0)):
        figures = SizeFigures(shape, 0.1, eager_ms, 1000.0)
        report.sizes.append(figures)
        record_step(ready, str(shape), eager_ms=figures.eager_ms, compiled_ms=figures.compiled_ms)
    (group,) = graph_groups(ready.library, machine_digest(ready.kinds[0].device))
    table = html.graph_table([group], Path("store"), 10**9, ENGLISH)
    for size, latent, times in (("128x128", (16, 16), "3.0"), ("192x128", (16, 24), "1.2")):
        with ready.picture():
            small(*latent)
        assert ready.wait_for_builds(TIMEOUT_S)
        with ready.picture():
            small(*latent)
        status = ready.status()
        assert header_of(status, True, None, ENGLISH).text == f"graphs, {times}x"
        assert f"({times}x measured)" in status.line()
        assert status.without_s / status.picture_s == pytest.approx(float(times))
        assert f"{size}: {times}x" in table
        assert f"{size} {times}x" in report.line()
    with ready.picture():
        small(24, 16)  # a size that nobody measured
    assert header_of(ready.status(), True, None, ENGLISH).text == "graphs"
    assert "measured" not in ready.status().line()

"""Warm-up: kinds, CUDA graphs, and a measured step of each size."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from onediff_ext.core.shapes import BatchShape
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.warmup import pipe_warm_up
from onediff_ext.session.warm_up import WarmUp
from onediff_ext.session.warm_up_passes import in_passes
from onediff_ext.session.warm_up_report import SizeFigures, WarmUpReport
from tests.support import models

CHECKPOINT = "c" * 64
SHAPES = [BatchShape(128, 128), BatchShape(192, 128, 2)]


def figures(speedup):
    """One size at which graphs are some times as fast as eager."""
    return SizeFigures(SHAPES[0], 0.1, 10.0 * speedup, 10.0)


@pytest.fixture
def warm(open_session, small, instant_workers):
    """Makes warm-ups of the small UNet over one store."""

    def make(listen=None, shapes=SHAPES, **options):
        session = open_session(**options)
        session.use_checkpoint(CHECKPOINT, name="small", architecture="sd1")
        compile_pipe(small.pipe, session=session)
        return session, pipe_warm_up(small.pipe, shapes, listen)

    return make


def test_everything_is_built_and_measured(warm):
    seen = []
    session, warm_up = warm(seen.append)
    report = warm_up.run()
    assert report.built == len(session.kinds) > 5
    assert [figures.shape for figures in report.sizes] == SHAPES
    assert all(f.eager_ms > 0 and f.compiled_ms > 0 and f.first_s > 0 for f in report.sizes)
    assert list(dict.fromkeys(p.stage for p in seen)) == ["kinds", "captures", "measuring"]
    kinds = [p for p in seen if p.stage == "kinds"]
    assert kinds[-1].done == kinds[-1].needed == len(session.kinds)
    assert session.stage == ""
    status = session.status()
    assert status.speedup == pytest.approx(report.speedup)
    assert "measured" in status.line()
    json = report.as_json()
    assert json["sizes"][1]["size"] == "192x128@2"
    steps = session.build_context.history.steps(machine_of(session), CHECKPOINT)
    assert [step.size for step in steps] == ["128x128", "192x128@2"]


def machine_of(session):
    from onediff_ext.engine.machine import machine_digest

    return machine_digest(session.kinds[0].device)


def test_a_second_one_builds_nothing(warm):
    warm()[1].run()
    session, warm_up = warm()
    report = warm_up.run()
    assert (report.built, report.loaded) == (0, len(session.kinds))
    assert not [e for e in session.event_log.events if e.what == "build"]


def test_cancelled_while_building(warm):
    session, warm_up = warm()
    timer = threading.Timer(0.0, warm_up.cancel)
    session.build_context.history.build_seconds  # noqa: B018
    step = warm_up._forward

    def cancel_after_the_first(shape, noise):
        step(shape, noise)
        if not timer.is_alive() and not timer.finished.is_set():
            timer.start()

    warm_up._forward = cancel_after_the_first
    report = warm_up.run()
    assert report.cancelled
    assert report.sizes == []
    assert report.line().startswith("Cancelled. ")
    assert not session.status().building
    assert session.stage == ""


@pytest.mark.parametrize(
    ("last", "measured"), [(2, 0), (5, 0), (12, 1), (13, 1)], ids=["first", "pair", "all", "next"]
)
def test_cancelled_between_steps(open_session, small, monkeypatch, last, measured):
    """One for the kinds; then one and five pairs for each size."""
    monkeypatch.setattr("onediff_ext.session.warm_up._MEASURE_S", 60)
    session = open_session(build="never")
    compile_pipe(small.pipe, session=session)
    steps = []

    def step(shape, noise):
        steps.append(shape)
        small(shape.height_px // 8, shape.width_px // 8)
        if len(steps) == last:
            warm_up.cancel()

    components = compiled_state(small.pipe).components
    warm_up = WarmUp(session, components, step, lambda: None, SHAPES, torch.device("cpu"))
    report = warm_up.run()
    assert report.cancelled
    assert len(steps) == last
    assert len(report.sizes) == measured


def test_a_whole_pipeline_has_its_vae_warm_too(open_session, instant_workers):
    pipe = models.sd15()
    session = open_session()
    compile_pipe(pipe, session=session)
    pipe_warm_up(pipe, SHAPES[:1]).run()
    assert any(kind.label.startswith("Attention") for kind in session.kinds)
    assert session.count("built") == len(session.kinds)


def test_restart_reads_ahead_and_the_first_forward_is_compiled(warm, open_session):
    session, warm_up = warm()
    warm_up.run()
    kinds = len(session.kinds)
    again = open_session()
    again.use_checkpoint(CHECKPOINT, name="small", device=torch.device("cpu"))
    again.read_ahead.wait()
    from tests.support.session_fixtures import SmallUNet

    other = SmallUNet(seed=3)
    compile_pipe(other.pipe, session=again)
    other()
    assert again.count("loaded") == kinds == len(again.kinds)
    assert {e.reason for e in again.event_log.events} == {"read ahead"}
    start = time.monotonic()
    assert again.status().running == "compiled"
    assert time.monotonic() - start < 1


def test_it_gives_way_while_graphs_are_built_and_they_go_on(warm):
    wanted = []
    session, warm_up = warm(lambda progress: wanted.append(True))  # told while it waits for builds
    warm_up._give_way = lambda: bool(wanted)
    report = warm_up.run()
    assert (report.gave_way, report.cancelled, report.sizes) == (True, False, [])
    assert session.stage == ""
    assert session.wait_for_builds(60)
    assert session.count("built") == len(session.kinds) > 5


@pytest.mark.parametrize("steps_before", range(2, 14, 3))
def test_what_one_pass_leaves_the_next_one_does(warm, monkeypatch, steps_before):
    """Somebody wants a picture after so many steps, once."""
    monkeypatch.setattr("onediff_ext.session.warm_up_passes._LET_PASS_S", 0.0)
    warm()[1].run()
    steps, lists = [], []

    def one_pass(left):
        lists.append(left)
        _, warm_up = warm(shapes=left)
        step = warm_up._forward
        warm_up._forward = lambda *given: (steps.append(given), step(*given))
        warm_up._give_way = lambda: len(lists) == 1 and len(steps) >= steps_before
        return warm_up.run()

    report = in_passes(SHAPES, one_pass, lambda: False)
    assert sorted(str(figures.shape) for figures in report.sizes) == sorted(map(str, SHAPES))
    assert not report.gave_way
    assert len(lists) == 2
    assert lists[0] == SHAPES
    assert set(lists[1]) <= set(SHAPES)


def test_a_cancel_between_passes_ends_them(warm, monkeypatch):
    monkeypatch.setattr("onediff_ext.session.warm_up_passes._LET_PASS_S", 0.0)

    def one_pass(left):
        return WarmUpReport(gave_way=True)

    report = in_passes(SHAPES, one_pass, lambda: True)
    assert report.cancelled
    assert in_passes(SHAPES, lambda left: None, lambda: False) is None


def test_status_tells_how_many_sizes_are_done(warm):
    seen = []
    session, warm_up = warm(lambda progress: seen.append((progress.stage, session.status())))
    warm_up.run()
    measuring = [status for stage, status in seen if stage == "measuring"]
    assert [(s.sizes_done, s.sizes_needed) for s in measuring] == [(0, 2), (1, 2), (2, 2)]
    assert "warming up 1 of 2 sizes" in measuring[1].line()
    assert session.status().sizes_needed == 0
    assert "warming up" not in session.status().line()


def test_graphs_that_were_there_before_count_as_loaded(warm, small):
    session, warm_up = warm(shapes=SHAPES[:1])
    built = warm_up.run()
    assert (built.built, built.loaded) == (len(session.kinds), 0)
    again = pipe_warm_up(small.pipe, SHAPES[:1]).run()
    assert (again.built, again.loaded) == (0, len(session.kinds))
    assert again.line().startswith(
        f"Ready: 1 size. All {len(session.kinds)} graphs were there already."
    )


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            WarmUpReport(sizes=[figures(2.0), figures(2.0)], built=14),
            "Ready: 2 sizes. All 14 graphs are built. A step is 2.0x as fast as without.",
        ),
        (
            WarmUpReport(sizes=[figures(1.04)], loaded=14),
            "Ready: 1 size. All 14 graphs were there already. Graphs bring no gain at this size.",
        ),
        (
            WarmUpReport(sizes=[figures(0.9)] * 2, built=1),
            "Ready: 2 sizes. Graphs built: 1. Graphs bring no gain at these sizes.",
        ),
        (
            WarmUpReport(
                sizes=[
                    SizeFigures(SHAPES[0], 0.1, 15.0, 10.0),
                    SizeFigures(SHAPES[1], 0.1, 10.0, 10.0),
                ],
                built=3,
            ),
            "Ready: 2 sizes. All 3 graphs are built. A step is faster than without: 128x128 1.5x,"
            " 192x128@2 1x.",
        ),
        (
            WarmUpReport(sizes=[figures(1.5)], built=5, loaded=9),
            "Ready: 1 size. Graphs built: 5; 9 were there already. A step is 1.5x as fast as"
            " without.",
        ),
        (
            WarmUpReport(sizes=[figures(1.5)], built=13, eager=1, why_eager="no such operator"),
            "Ready: 1 size. Graphs built: 13. Graphs that could not be built: 1 (no such"
            " operator). A step is 1.5x as fast as without.",
        ),
        (
            WarmUpReport(built=5, loaded=2, cancelled=True),
            "Cancelled. Graphs built: 5; 2 were there already. The next picture has its missing"
            " graphs built.",
        ),
        (
            WarmUpReport(sizes=[figures(1.5)], loaded=3, gave_way=True),
            "The warm-up ended early. Sizes that are ready: 1. Graphs that were there already: 3."
            " A step is 1.5x as fast as without.",
        ),
    ],
)
def test_the_result_reads_as_what_it_is(report, line):
    assert report.line() == line


def test_a_failed_graph_is_told_with_its_reason(warm, monkeypatch):
    session, warm_up = warm(shapes=SHAPES[:1])

    def fail_one():
        kind = session.kinds[0]
        kind.fail("no such operator")

    made = warm_up._make_kinds
    monkeypatch.setattr(warm_up, "_make_kinds", lambda: (made(), fail_one()))
    report = warm_up.run()
    assert (report.eager, report.why_eager) == (1, "no such operator")


def test_a_warm_up_that_was_paused_ends_as_any_other(open_session, small, instant_workers):
    """The end of a pause comes before its builds begin; the warm-up once took it for the end."""
    session = open_session()
    session.use_checkpoint(CHECKPOINT, name="small", architecture="sd1")
    compile_pipe(small.pipe, session=session)
    told = []

    def end_only_the_pause(progress):
        told.append(progress)
        if len(told) == 3:
            session.background.end_pause()

    session.pause_builds()
    report = pipe_warm_up(small.pipe, SHAPES[:1], end_only_the_pause).run()
    assert report.built == len(session.kinds)
    assert report.line().startswith(f"Ready: 1 size. All {report.built} graphs are built.")


def test_sizes_of_earlier_passes_count_in_the_progress(warm, small):
    session, _ = warm()
    seen = []
    warm_up = pipe_warm_up(
        small.pipe, SHAPES[1:], lambda _: seen.append(session.sizes_done), measured_before=1
    )
    warm_up.run()
    assert set(seen) == {(1, 2), (2, 2)}


def test_passes_count_what_was_built_between_them_too():
    # 5 graphs of this process before, 2 loaded; 3 built in the first pass, 4 more until the second.
    first = WarmUpReport(built=3, loaded=7, built_before=5)
    second = WarmUpReport(built=1, loaded=14, built_before=12)
    both = first.followed_by(second)
    assert (both.built, both.loaded, both.built_before) == (8, 7, 5)


@pytest.mark.parametrize("announced", [True, False])
def test_it_leaves_the_last_pictures_eager_blocks_and_their_reason(warm, small, announced):
    """*Build now* turned the header green while NegPiP had kept half of the picture eager."""
    session, warm_up = warm()
    warm_up.run()
    blocks = [runner.block for runner in compiled_state(small.pipe).components[0].runners]
    hooked = [block for block in blocks if hasattr(block, "attn1")]
    handles = [block.attn1.register_forward_hook(lambda *_: None) for block in hooked]
    with session.picture() if announced else nullcontext():
        small()
    if announced:
        for handle in handles:  # as NegPiP does when a job ends
            handle.remove()
    before = session.status()
    assert before.running == "compiled in part"
    for _ in range(2):
        if not announced:
            for handle in handles:
                handle.remove()
        pipe_warm_up(small.pipe, SHAPES).run()
        after = session.status()
        assert after.running == before.running
        assert after.eager_blocks == before.eager_blocks
        assert after.changed_by == before.changed_by
        assert (after.blocks_compiled, after.blocks_needed) == (
            before.blocks_compiled,
            before.blocks_needed,
        )
        assert any(before.eager_blocks[0][0] in reason for reason in after.reasons)
    with session.picture() if announced else nullcontext():
        small()
    assert session.status().running == "compiled"


def test_the_extension_behind_eager_blocks_is_still_named_after_it(warm, small):
    session, warm_up = warm()
    warm_up.run()
    runner = compiled_state(small.pipe).components[0].runners[0]
    with session.picture():
        small()
        runner.used, runner.eager_reason = None, "a hook"
        compiled_state(small.pipe).components[0].foreign_blocks.changed_by["a hook"] = "negpip"
    compiled_state(small.pipe).components[0].foreign_blocks.changed_by = {}  # attached again
    pipe_warm_up(small.pipe, SHAPES).run()
    assert session.status().changed_by == (("a hook", "negpip"),)
    assert session.status().eager_blocks == (("a hook", 1),)
    session.use_checkpoint("d" * 64, name="other", architecture="sd1")
    assert session.status().eager_blocks == ()


def test_graphs_that_a_warm_up_builds_count_for_the_last_picture(warm, small):
    """They serve the next picture, as those do that are built beside pictures."""
    session, warm_up = warm()
    session.pause_builds()
    with session.picture():
        small()
    assert session.status().running == "eager"
    session.go_on_with_builds()
    warm_up.run()
    assert session.status().running == "compiled"
    undo_compile(small.pipe)
    assert session.status().blocks_needed == 0

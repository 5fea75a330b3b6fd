"""Pause, go on and cancel: which builds end, and which pictures have what is missing built."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.hosts.diffusers.warmup import pipe_warm_up
from onediff_ext.session.session import Session
from tests.support.held_builds import builds_on_hold
from tests.support.session_fixtures import SmallUNet
from tests.support.systems import needs_fork

TIMEOUT_S = 60.0
Ending = Callable[[Session], None]


@pytest.fixture
def ended(open_session, small: SmallUNet, instant_workers) -> Callable[[Ending], Session]:
    """Makes a session whose builds a picture has started and `ending` has ended."""

    def make(ending: Ending) -> Session:
        session: Session = open_session()
        compile_pipe(small.pipe, session=session)
        with builds_on_hold(session):
            with session.picture():
                small()
            thread = threading.Thread(target=ending, args=(session,))
            thread.start()
            while not session.background._stop.is_set():
                time.sleep(0.01)
        thread.join(TIMEOUT_S)
        assert session.wait_for_builds(TIMEOUT_S)
        assert session.missing()
        return session

    return make


def states(session: Session) -> set[KindState]:
    return {kind.state for kind in session.kinds}


def test_the_next_picture_builds_what_was_cancelled(ended, small: SmallUNet) -> None:
    session = ended(Session.cancel_builds)
    assert "the next picture has its missing graphs built" in session.status().line()
    with session.picture():
        small()
    assert session.background.is_building
    assert not session.status().cancelled
    assert session.background._wanted() == session.missing()


def test_a_cancel_holds_for_the_rest_of_its_picture(
    open_session, small: SmallUNet, instant_workers
) -> None:
    session = open_session()
    compile_pipe(small.pipe, session=session)
    with session.picture():
        small()
        session.cancel_builds()
        small()
        assert not session.background.is_building
    assert session.wait_for_builds(TIMEOUT_S)
    assert states(session) == {KindState.MISSING}
    assert session.status().cancelled


def test_a_picture_without_these_kinds_leaves_them_cancelled(ended) -> None:
    session = ended(Session.cancel_builds)
    with session.picture():
        pass
    assert session.status().cancelled
    assert not session.background.is_building


def test_a_pause_holds_builds_until_go_on(ended, small: SmallUNet) -> None:
    session = ended(Session.pause_builds)
    for _ in range(2):
        with session.picture():
            small()
    assert not session.background.is_building
    status = session.status()
    assert (status.paused, status.cancelled) == (True, False)
    assert f"{len(session.kinds)} not built (paused)" in status.line()
    assert "builds are paused until Go on" in status.line()
    session.go_on_with_builds()
    assert session.background.is_building
    assert not session.status().paused


def test_go_on_builds_what_was_cancelled_too(ended) -> None:
    session = ended(Session.cancel_builds)
    session.go_on_with_builds()
    assert session.background.is_building
    assert session.background._wanted() == session.missing()


def test_a_pause_holds_builds_after_the_first_step(open_session, small: SmallUNet) -> None:
    session = open_session(build="wait")
    compile_pipe(small.pipe, session=session)
    session.pause_builds()
    small()
    assert states(session) == {KindState.MISSING}


@pytest.mark.parametrize("children", [0, pytest.param(None, marks=needs_fork)])
def test_a_picture_that_waits_for_its_graphs_gets_them_beside_other_builds(
    open_session, small: SmallUNet, instant_workers, children: int | None
) -> None:
    """Without forks, exports of the builds beside it wait for its end or for its next step."""
    session = open_session(build="wait")
    session.build_context.export_children = children
    compile_pipe(small.pipe, session=session)
    session.pause_builds()
    small()

    def draw() -> None:
        with session.picture():
            small()

    session.go_on_with_builds()
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    draw()  # compares the graphs
    assert states(session) == {KindState.READY}


def test_a_warm_up_waits_while_builds_are_paused(
    open_session, small: SmallUNet, instant_workers
) -> None:
    session = open_session()
    session.use_checkpoint("c" * 64, name="small", architecture="sd1")
    compile_pipe(small.pipe, session=session)
    told = []

    def go_on_later(progress: object) -> None:
        told.append(progress)
        if len(told) == 3:
            assert session.builds_are_paused
            assert states(session) == {KindState.MISSING}
            session.go_on_with_builds()

    session.pause_builds()
    report = pipe_warm_up(small.pipe, [BatchShape(128, 128)], go_on_later).run()
    assert report.built == len(session.kinds)
    assert len(report.sizes) == 1

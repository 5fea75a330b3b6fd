"""A process that is forked while our threads work draws, tells its status and is undone.

Such as a worker of a server that loads its pipeline before it forks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_ext.backends.inductor import standalone_artefact
from onediff_ext.building.torch_lock import TORCH_LOCK
from onediff_ext.core import garbage_collection, priority
from onediff_ext.hosts.diffusers import pipeline_calls
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.session.session import Session
from tests.support.draw import relative_error
from tests.support.forked_child import in_another_thread, passes_in_child
from tests.support.session_fixtures import InstantWorker, SmallUNet
from tests.support.systems import needs_fork

pytestmark = needs_fork
TIMEOUT_S = 60
LOCKS: dict[str, Callable[[Session], Any]] = {
    "foreground": lambda session: session.foreground._changed,
    "background builds": lambda session: session.background._changed,
    "build run": lambda session: session.builder._running,
    "read ahead": lambda session: session.read_ahead._changed,
    "graph loader": lambda session: session.build_context.graph_loader._lock,
    "events": lambda session: session.event_log._lock,
    "kinds": lambda session: session._met.lock,
    "blocks of a kind": lambda session: session.kinds[0].blocks._lock,
    "fallbacks": lambda session: session._fallbacks._lock,
    "last picture": lambda session: session.last_picture._lock,
    "torch": lambda session: TORCH_LOCK,
    "calls of pipelines": lambda session: pipeline_calls._lock,
    "loading": lambda session: standalone_artefact._loading,
    "collection": lambda session: garbage_collection._pausing._lock,
    "switches": lambda session: priority._switching._lock,
}


@pytest.fixture
def compiled(
    open_session: Callable[..., Session], instant_workers: None
) -> tuple[SmallUNet, Session]:
    """A compiled UNet with all graphs."""
    small, session = SmallUNet(), open_session()
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    small()
    assert session.status().running == "compiled"
    return small, session


def use(small: SmallUNet, session: Session, expected: torch.Tensor) -> None:
    """All that a child does with a compiled pipeline."""
    assert not session.status().building
    assert relative_error(small(), expected) < 1e-4
    assert relative_error(small(8, 24), small(8, 24)) < 1e-4
    session.status()
    undo_compile(small.pipe)
    assert relative_error(small(), expected) < 1e-4
    session.close()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_another_thread_holds_at_the_fork(
    compiled: tuple[SmallUNet, Session], name: str
) -> None:
    small, session = compiled
    expected, lock = small(), LOCKS[name](session)

    def work() -> None:
        with lock:
            pass
        use(small, session, expected)

    with in_another_thread(lock):
        assert passes_in_child(work)


@pytest.mark.parametrize("alone", [False, True])
def test_a_turn_of_another_thread(compiled: tuple[SmallUNet, Session], alone: bool) -> None:
    small, session = compiled
    expected = small()
    session.foreground.let_picture_end(TIMEOUT_S, threading.Event())
    with in_another_thread(session.foreground.turn(0.01, alone=alone)):
        assert passes_in_child(lambda: use(small, session, expected))


def test_a_picture_of_another_thread(compiled: tuple[SmallUNet, Session]) -> None:
    """In the child nothing is being drawn: it may build."""
    small, session = compiled
    expected = small()

    def work() -> None:
        time.sleep(0.4)  # a silence after the last forward
        assert not session.foreground.is_drawing
        assert session.foreground.moment is None
        use(small, session, expected)

    foreground = session.foreground
    with in_another_thread(foreground.picture()), in_another_thread(foreground.forward()):
        assert passes_in_child(work)


def test_the_forking_threads_own_picture(compiled: tuple[SmallUNet, Session]) -> None:
    small, session = compiled
    expected, foreground = small(), session.foreground
    picture, forward = foreground.picture(), foreground.forward()

    def work() -> None:
        assert foreground.moment is not None
        forward.__exit__(None, None, None)
        assert foreground.moment is None
        assert foreground.is_drawing
        picture.__exit__(None, None, None)
        use(small, session, expected)

    with picture, forward:
        assert passes_in_child(work)


def test_builds_of_the_parent(
    open_session: Callable[..., Session],
    instant_workers: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child does not wait for them, and builds itself what it needs."""
    begun, go_on = threading.Event(), threading.Event()
    build, parent = InstantWorker.build, os.getpid()

    def waiting(worker: InstantWorker, *arguments: Any) -> Any:
        begun.set()
        assert os.getpid() != parent or go_on.wait(TIMEOUT_S)
        return build(worker, *arguments)

    monkeypatch.setattr(InstantWorker, "build", waiting)
    small, session = SmallUNet(), open_session()
    compile_pipe(small.pipe, session=session)
    expected = small()
    assert begun.wait(TIMEOUT_S)
    assert session.background.is_building

    def work() -> None:
        assert session.wait_for_builds(0)
        assert session.builder.run is None
        use(small, session, expected)

    try:
        assert passes_in_child(work)
    finally:
        go_on.set()
    assert session.wait_for_builds(TIMEOUT_S)
    assert not session.missing()
    assert relative_error(small(), expected) < 1e-4

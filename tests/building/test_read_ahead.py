"""Pictures that begin while their graphs are loaded: they wait, or are drawn eager."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext.core.errors import BackendError
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe, one_picture
from onediff_ext.session.session import Session
from tests.support.draw import relative_error
from tests.support.forked_child import passes_in_child
from tests.support.session_fixtures import (  # noqa: F401
    SmallUNet,
    exports,
    instant_workers,
    open_session,
)
from tests.support.systems import needs_fork

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TIMEOUT_S = 60
PAUSE_S = 0.5
IS_LOADING = "its stored graph is being loaded"


class SlowLoads:
    """Loads of a session that wait until they may go on."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.begun = threading.Event(), threading.Event()
        self.fails: set[int] = set()
        self._load, self.count = session.build_context.load, 0
        monkeypatch.setattr(session.build_context, "load", self)

    def __call__(self, payload: bytes, device: torch.device) -> Any:
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        self.count += 1
        if self.count in self.fails:
            raise BackendError("no luck")
        return self._load(payload, device)


Loading = Callable[..., tuple[SmallUNet, Session, SlowLoads]]


def draw(small: SmallUNet, count: int = 1) -> torch.Tensor:
    with one_picture(small.pipe):
        return [small() for _ in range(count)][-1]


@pytest.fixture
def expected() -> torch.Tensor:
    return SmallUNet()()


@pytest.fixture
def used(open_session: Callable[..., Session], instant_workers: None) -> list[str]:  # noqa: F811
    """Digests of the small UNet's kinds, whose graphs are stored."""
    small, session = SmallUNet(), open_session()
    compile_pipe(small.pipe, session=session)
    draw(small)
    assert session.wait_for_builds(TIMEOUT_S)
    return [kind.key.digest for kind in session.kinds]


def second(open_session: Callable[..., Session]) -> tuple[SmallUNet, Session]:  # noqa: F811
    small, session = SmallUNet(), open_session()
    compile_pipe(small.pipe, session=session)
    return small, session


@pytest.fixture
def loading(
    open_session: Callable[..., Session],  # noqa: F811
    used: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Loading:
    """Begins a second process that loads the graphs; the first load waits in `SlowLoads`."""

    def begin(
        patience_s: float = 0.0, expected_s: float = 1000.0
    ) -> tuple[SmallUNet, Session, SlowLoads]:
        small, session = second(open_session)
        loads = SlowLoads(session, monkeypatch)
        session.read_ahead.start(lambda: used, CPU, patience_s=patience_s, expected_s=expected_s)
        assert loads.begun.wait(TIMEOUT_S)
        return small, session, loads

    return begin


def states(session: Session) -> set[KindState]:
    return {kind.state for kind in session.kinds}


def test_a_picture_that_saves_less_than_the_wait_is_drawn_eager(
    loading: Loading,
    used: list[str],
    expected: torch.Tensor,
) -> None:
    small, session, loads = loading(patience_s=1.0)
    assert torch.equal(draw(small, 2), expected)
    assert {kind.reason for kind in session.kinds} == {IS_LOADING}
    assert states(session) == {KindState.MISSING}
    assert session.missing() == []  # nothing is built
    assert not session.background.is_building
    assert session.status().running == "eager"
    loads.go_on.set()
    session.read_ahead.wait(TIMEOUT_S)
    assert relative_error(draw(small, 2), expected) < 1e-4
    assert states(session) == {KindState.READY}
    assert session.count("loaded") == len(used)
    assert {event.reason for event in session.event_log.events} == {"read ahead"}


@needs_fork
@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_forked_process_waits_for_no_load_of_its_parent(
    loading: Loading, used: list[str], expected: torch.Tensor, is_deferred: bool
) -> None:
    small, session, loads = loading(patience_s=1.0 if is_deferred else math.inf)
    if is_deferred:
        draw(small)
        assert {kind.reason for kind in session.kinds} == {IS_LOADING}

    def work() -> None:
        loads.go_on.set()  # of the child's own loads
        assert not session.read_ahead.is_reading
        session.read_ahead.wait()
        start = time.monotonic()
        assert relative_error(draw(small), expected) < 1e-4
        assert time.monotonic() - start < 8  # `ReadAhead.take` waits for 10 s
        assert IS_LOADING not in {kind.reason for kind in session.kinds}
        session.close()

    assert passes_in_child(work)
    loads.go_on.set()
    session.read_ahead.wait(TIMEOUT_S)
    assert relative_error(draw(small, 2), expected) < 1e-4
    assert session.count("loaded") == len(used)


def test_graphs_change_after_the_picture_only(
    loading: Loading,
    expected: torch.Tensor,
) -> None:
    small, session, loads = loading()
    with one_picture(small.pipe):
        small()
        loads.go_on.set()
        session.read_ahead.wait(TIMEOUT_S)
        assert torch.equal(small(), expected)
        assert states(session) == {KindState.MISSING}
    assert states(session) == {KindState.UNCHECKED}


def test_loading_pauses_while_that_picture_is_drawn(
    loading: Loading,
    used: list[str],
) -> None:
    small, session, loads = loading()
    with one_picture(small.pipe):
        small()
        loads.go_on.set()
        time.sleep(PAUSE_S)
        assert loads.count == 1 < len(used)  # the one that was in work
        assert session.read_ahead.is_reading
    thread = session.read_ahead._thread
    assert thread is not None
    thread.join(TIMEOUT_S)
    assert loads.count == len(used)
    assert session.read_ahead.load_s is not None
    with one_picture(small.pipe):
        small()
    assert states(session) == {KindState.READY}


def test_loading_pauses_from_the_begin_of_a_picture_that_does_not_wait(
    loading: Loading,
    used: list[str],
    expected: torch.Tensor,
) -> None:
    """A host loads its model in between, in Python."""
    small, session, loads = loading(patience_s=math.inf)
    session.read_ahead.begin_picture(patience_s=1.0, expected_s=1000.0)
    loads.go_on.set()
    time.sleep(PAUSE_S)
    assert loads.count == 1  # the one that had begun
    assert torch.equal(draw(small, 2), expected)
    assert {kind.reason for kind in session.kinds} == {IS_LOADING}
    time.sleep(PAUSE_S)
    assert loads.count == 1
    session.read_ahead.end_picture()
    session.read_ahead.wait(TIMEOUT_S)
    assert loads.count == len(used)
    assert relative_error(draw(small, 2), expected) < 1e-4
    assert states(session) == {KindState.READY}


def test_only_one_picture_pauses_loading(loading: Loading, used: list[str]) -> None:
    _, session, loads = loading()
    session.read_ahead.begin_picture(patience_s=1.0, expected_s=1000.0)
    session.read_ahead.begin_picture(patience_s=1.0, expected_s=1000.0)  # the first one failed
    loads.go_on.set()
    thread = session.read_ahead._thread
    assert thread is not None
    thread.join(TIMEOUT_S)
    assert loads.count == len(used)


def test_a_picture_that_saves_more_than_the_rest_takes_pauses_nothing(
    loading: Loading, used: list[str]
) -> None:
    small, session, loads = loading()
    session.read_ahead.begin_picture(patience_s=10.0, expected_s=5.0)
    loads.go_on.set()
    draw(small, 2)
    assert states(session) == {KindState.READY}
    assert loads.count == len(used)


def test_the_pause_is_no_part_of_the_loading_time(
    loading: Loading,
) -> None:
    began_at = time.monotonic()
    small, session, loads = loading()
    with one_picture(small.pipe):
        small()
        loads.go_on.set()
        time.sleep(PAUSE_S)
    session.read_ahead.wait(TIMEOUT_S)
    elapsed_s = time.monotonic() - began_at
    assert session.read_ahead.load_s is not None
    assert 0 < session.read_ahead.load_s < elapsed_s - 0.9 * PAUSE_S


@pytest.mark.parametrize(("patience_s", "expected_s"), [(math.inf, 1000.0), (2.0, 1.0)])
def test_a_picture_that_saves_more_waits(
    loading: Loading,
    expected: torch.Tensor,
    patience_s: float,
    expected_s: float,
) -> None:
    small, session, loads = loading(patience_s, expected_s)
    threading.Timer(0.2, loads.go_on.set).start()
    assert relative_error(draw(small, 2), expected) < 1e-4
    assert states(session) == {KindState.READY}


def test_loaded_graphs_are_used_at_once(
    open_session: Callable[..., Session],  # noqa: F811
    used: list[str],
) -> None:
    small, session = second(open_session)
    session.read_ahead.start(lambda: used, CPU, patience_s=0.0, expected_s=1000.0)
    session.read_ahead.wait(TIMEOUT_S)
    assert session.read_ahead.load_s is not None
    draw(small, 2)
    assert states(session) == {KindState.READY}


def test_a_graph_that_cannot_be_loaded_is_looked_at_by_a_build(
    loading: Loading,
    used: list[str],
    expected: torch.Tensor,
) -> None:
    small, session, loads = loading()
    loads.fails = {2}
    draw(small)
    loads.go_on.set()
    session.read_ahead.wait(TIMEOUT_S)
    left: list[BlockKind] = session.missing()
    assert [kind.key.digest for kind in left] == [used[1]]
    draw(small)
    assert session.wait_for_builds(TIMEOUT_S)
    assert relative_error(draw(small, 2), expected) < 1e-4
    assert states(session) == {KindState.READY}


def test_a_process_that_ends_meanwhile_ends_well_and_soon(tmp_path: Path) -> None:
    script = f"""
import atexit, time
atexit.register(lambda: print(len(loaded), session.read_ahead.is_reading))  # runs last
import torch
from onediff_ext.hosts.diffusers.compile import new_session
session = new_session({{"backend": "eager", "store": {str(tmp_path)!r}}})
context, loaded = session.build_context, []
context.library.find = lambda digest: loaded.append(digest) or time.sleep(0.05)
session.read_ahead.start(lambda: ["a" * 64] * 1000, torch.device("cpu"), patience_s=0.0)
while not loaded:
    time.sleep(0.01)
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert (said.returncode, said.stderr) == (0, "")
    count, is_reading = said.stdout.split()
    assert int(count) < 100
    assert is_reading == "False"


@pytest.mark.parametrize("kept", [slice(None), slice(-1, None), slice(0, 0)])
def test_other_graphs_are_wanted_while_some_are_loaded(
    loading: Loading, used: list[str], kept: slice
) -> None:
    """A WebUI loads those of its last picture when it starts; the user takes another checkpoint."""
    _, session, loads = loading()
    first, wanted = used[0], used[kept]
    session.read_ahead.start(lambda: wanted, CPU)
    loads.go_on.set()
    session.read_ahead.wait(TIMEOUT_S)
    assert not session.read_ahead.is_reading
    assert set(session.read_ahead._graphs) == set(wanted)
    assert loads.count == len({first, *wanted})  # none twice
    session.read_ahead.start(lambda: used, CPU)
    session.read_ahead.wait(TIMEOUT_S)
    assert set(session.read_ahead._graphs) == set(used)


def test_a_closed_session_keeps_no_graphs(loading: Loading) -> None:
    _, session, loads = loading()
    session.close()
    loads.go_on.set()
    session.read_ahead.wait(TIMEOUT_S)
    assert loads.count == 1  # the one in work
    session.read_ahead.start(lambda: pytest.fail("it is closed"), CPU)
    assert not session.read_ahead.is_reading


def test_what_loads_need_is_imported_ahead_only_where_there_is_a_graph_to_load(
    open_session: Callable[..., Session],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The imports take three seconds of Python, from the first picture of an empty store."""
    taken: list[str] = []

    def steps_of(name: str, digests: list[str], *, is_safe: bool = True) -> list[str]:
        session = open_session()
        if not is_safe:
            trust = session.build_context.graph_trust
            monkeypatch.setattr(trust, "is_load_safe_on", lambda *_: None)
        monkeypatch.setattr(
            session.backend, "loading_steps", lambda _: [lambda: taken.append(name)], raising=False
        )
        session.read_ahead.start(lambda: digests, CPU)
        session.read_ahead.wait(TIMEOUT_S)
        session.close()
        return taken

    assert steps_of("empty store", []) == []
    used: list[str] = request.getfixturevalue("used")
    taken.clear()  # builds take them too
    assert steps_of("graphs of another machine", used, is_safe=False) == []
    assert steps_of("a checkpoint that was never drawn with", []) == [
        "a checkpoint that was never drawn with"
    ]
    taken.clear()
    assert steps_of("used before", used) == ["used before"]

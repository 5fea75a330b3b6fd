"""Builds in the background: pictures do not wait, and no graph changes within a picture."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from onediff_ext.building import background_builds
from onediff_ext.building.worker_failures import worker_lost_error
from onediff_ext.core.errors import BackendError, MachineError
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.hosts.diffusers.compile import compile_pipe
from tests.support import models
from tests.support.draw import relative_error
from tests.support.session_fixtures import SmallUNet
from tests.support.systems import needs_fork

TIMEOUT_S = 240


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_first_forward_is_eager_and_later_ones_compiled(open_session, small):
    expected = small()
    session = open_session()
    compile_pipe(small.pipe, session=session)
    assert relative_error(small(), expected) == 0
    assert session.status().building
    assert session.wait_for_builds(TIMEOUT_S)
    assert relative_error(small(), expected) < 1e-4
    assert relative_error(small(), expected) < 1e-4
    status = session.status()
    assert (status.running, status.kinds_ready, status.building) == (
        "compiled",
        status.kinds_needed,
        False,
    )
    assert status.kinds_needed == len(session.kinds) > 5
    assert {kind.state for kind in session.kinds} == {KindState.READY}
    assert {event.what for event in session.event_log.events} == {"build", "built"}


def test_without_a_graph_blocks_are_looked_at_once_a_picture(open_session, small, monkeypatch):
    session = open_session(build="never")
    compile_pipe(small.pipe, session=session)
    expected, looked, prepare = small(), [], BlockRunner._prepare
    monkeypatch.setattr(
        BlockRunner, "_prepare", lambda self, *call: looked.append(self) or prepare(self, *call)
    )
    for _ in range(2):
        looked.clear()
        with session.picture():
            assert relative_error(small(), expected) == 0
            once = len(looked)
            calls = sum(kind.calls for kind in session.kinds)
            assert relative_error(small(), expected) == 0
        assert once == len(set(looked)) == len(looked) > 5
        assert sum(kind.calls for kind in session.kinds) == calls + once


def test_a_vae_that_is_float32_for_its_calls_only_gets_its_graphs(open_session, instant_workers):
    vae = models.vae(seed=1).half()
    session = open_session()
    compile_pipe(SimpleNamespace(vae=vae), session=session)
    latents = torch.randn(1, 4, 9, 7, generator=torch.Generator().manual_seed(2))

    def decode():
        with session.picture(), torch.no_grad():
            vae.to(torch.float32)
            picture = vae.decode(latents).sample
            vae.to(torch.float16)
            return picture

    expected = decode()
    assert session.wait_for_builds(TIMEOUT_S)
    for _ in range(2):
        assert relative_error(decode(), expected) < 1e-4
    assert session.fallbacks() == []
    assert {kind.state for kind in session.kinds} == {KindState.READY}


def test_graphs_change_between_pictures_only(open_session, small, instant_workers):
    session = open_session()
    session.foreground._drawn_s = 3600.0  # enough for exports between steps, where nothing forks
    compile_pipe(small.pipe, session=session)
    small()

    def two_more_are_built():
        small()
        return sum(e.what == "built" for e in session.event_log.events) >= before + 2

    with session.picture():
        before = session.status().kinds_ready
        wait_for(two_more_are_built)
        small()
        assert session.status().kinds_ready == session.count("built") == before
        assert not [e for e in session.event_log.events if e.what == "loaded"]  # once is enough
        with session.picture():  # nested ones are one
            small()
        assert session.status().kinds_ready == before
    assert session.status().kinds_ready >= before + 2


def test_cancel_is_immediate_and_keeps_what_is_built(open_session, small):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    small()
    wait_for(lambda: session.status().kinds_ready)
    start = time.monotonic()
    session.cancel_builds()
    assert time.monotonic() - start < 2
    status = session.status()
    assert status.cancelled
    assert not status.building
    assert 0 < status.kinds_ready < status.kinds_needed
    assert status.waiting == status.kinds_needed - status.kinds_ready
    assert "not built (cancelled)" in status.line()
    small()
    assert not session.status().building  # the user said no
    kept = status.kinds_ready
    session.build_in_background()
    assert session.wait_for_builds(TIMEOUT_S)
    # A graph that was stored in the moment of the cancel is loaded: none is built twice.
    assert session.count("built") + session.count("loaded") == len(session.kinds) > kept
    assert sum(e.what == "built" for e in session.event_log.events) == len(session.kinds)


def test_nothing_is_done_beside_the_first_picture_unless_it_takes_long(
    open_session, small, instant_workers, monkeypatch
):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    with session.picture():
        small()
        time.sleep(0.5)
        assert not session.event_log.events
    wait_for(lambda: session.event_log.events)
    session.close()
    monkeypatch.setattr(background_builds, "_FIRST_PICTURE_S", 0.1)
    session = open_session()
    compile_pipe(small.pipe, session=session)
    with session.picture():
        small()
        wait_for(lambda: session.event_log.events)


@pytest.mark.parametrize("children", [0, pytest.param(2, marks=needs_fork)])
def test_exports_here_or_in_children(open_session, small, children, instant_workers):
    session = open_session()
    session.build_context.export_children = children
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)


def test_an_export_in_this_process_waits_for_the_picture(open_session, small, instant_workers):
    session = open_session()
    session.build_context.export_children = 0
    compile_pipe(small.pipe, session=session)
    with session.picture():
        small()
        wait_for(lambda: session.status().stage == "exporting")
        time.sleep(1)
        assert session.status().stage == "exporting"
        assert session.builder.run.jobs.waiting == session.builder.run.jobs.working == []
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)


def test_a_picture_drawn_while_building_is_eager_to_the_last_bit(
    open_session, small, instant_workers
):
    expected = small(24, 16)
    session = open_session()
    compile_pipe(small.pipe, session=session)
    while not session.kinds or session.background.is_building:
        with session.picture():
            ready = session.status().kinds_ready
            found = small(24, 16)
        if not ready:
            assert relative_error(found, expected) == 0
        assert relative_error(found, expected) < 1e-4


class LosesWorkers:
    """A builder's `build_in` that loses the workers of one kind.

    Args:
        session: Whose builder.
        times: How often.
        lose: Ends a worker, or says how it died.
    """

    def __init__(self, session, times, lose):
        self._build_in, self._lose = session.build_context.build_in, lose
        self.left, self.program = times, b""

    def __call__(self, worker, program, device):
        if self.left and self.program in (b"", program):
            self.program, self.left = program, self.left - 1
            self._lose(worker)
        return self._build_in(worker, program, device)


def test_a_lost_worker_is_tried_again(open_session, small, monkeypatch):
    def kill(worker):
        worker._start()
        worker._process.kill()

    session = open_session()
    monkeypatch.setattr(session.build_context, "build_in", LosesWorkers(session, 2, kill))
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)
    retried = [e for e in session.event_log.events if e.what == "retried"]
    assert len(retried) == 2
    assert all("killed by" in event.reason for event in retried)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_kind_that_loses_all_its_workers_runs_eager(
    open_session, small, monkeypatch, instant_workers, name
):
    def die(worker):
        raise worker_lost_error(f"killed by {name}")

    session = open_session(build_attempts=2)
    monkeypatch.setattr(session.build_context, "build_in", LosesWorkers(session, 2, die))
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    (failed,) = [kind for kind in session.kinds if kind.state is KindState.FAILED]
    assert name in failed.reason
    status = session.status()  # before any other call
    assert (status.kinds_failed, status.reasons) == (1, (f"{failed.label}: {failed.reason}",))
    session.close()

    again = open_session()
    compile_pipe(small.pipe, session=again)
    small()
    assert again.wait_for_builds(TIMEOUT_S)
    assert again.count("loaded") == len(session.kinds) - 1
    if name == "SIGSEGV":  # its own fault, and remembered
        (failed,) = [kind for kind in again.kinds if kind.state is KindState.FAILED]
        assert failed.reason.startswith("given up on 20")
        assert again.retry_failed() == 1
        assert again.wait_for_builds(TIMEOUT_S)
    assert again.count("built") == 1
    assert list(again.build_context.build_records.failures()) == []


def test_a_kind_that_cannot_be_built_is_not_tried_again(
    open_session, small, monkeypatch, instant_workers
):
    session = open_session()

    def refuse(worker, program, device):
        raise BackendError("no such operator")

    monkeypatch.setattr(session.build_context, "build_in", refuse)
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.status().kinds_failed == len(session.kinds)
    again = open_session()
    compile_pipe(small.pipe, session=again)
    small()
    assert not again.background.is_building
    assert all("no such operator" in kind.reason for kind in again.kinds)
    status = again.status()
    assert status.running == "eager"
    small()
    assert "no such operator" in again.status().line()


def test_a_full_disk_fails_no_kind(open_session, small, monkeypatch, instant_workers):
    session = open_session()

    def full(worker, program, device):
        raise MachineError("No space left on device.", "Free some.")

    with monkeypatch.context() as patch:
        patch.setattr(session.build_context, "build_in", full)
        compile_pipe(small.pipe, session=session)
        small()
        assert session.wait_for_builds(TIMEOUT_S)
    assert {kind.state for kind in session.kinds} == {KindState.MISSING}
    assert "No space left" in session.status().line()
    small()
    assert not session.background.is_building  # not again at once
    session.build_in_background()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)
    assert session.status().problem == ""


def test_two_sessions_build_each_kind_once(open_session, small, instant_workers):
    sessions, others = [open_session(), open_session()], [small, SmallUNet(seed=1)]
    for session, other in zip(sessions, others, strict=True):
        compile_pipe(other.pipe, session=session)
    threads = [threading.Thread(target=other) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        assert session.wait_for_builds(TIMEOUT_S)
    kinds = len(sessions[0].kinds)
    assert sum(session.count("built") for session in sessions) == kinds
    assert sum(session.count("loaded") for session in sessions) == kinds


def test_the_most_useful_kind_is_built_first(open_session, small, instant_workers):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    built = [e.label for e in session.event_log.events if e.what == "built"]
    weights = [k.weight for label in built[:1] for k in session.kinds if k.label == label]
    assert max(weights) == max(kind.weight for kind in session.kinds)


def test_closing_leaves_nothing(open_session, small):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    small()
    wait_for(lambda: session.builder.run and session.builder.run.workers.pids)
    folder = session.builder.run.workers.folder.path
    session.close()
    assert not folder.exists()
    assert not [t for t in threading.enumerate() if t.name.startswith("onediff-b")]


def test_no_room_for_a_thread_does_not_cost_the_picture(
    open_session, small, instant_workers, monkeypatch
):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    start = threading.Thread.start

    def full(thread):
        if thread.name.startswith("onediff-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        small()
        assert not session.status().building
        assert "can't start new thread" in session.status().line()
    session.build_in_background()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)

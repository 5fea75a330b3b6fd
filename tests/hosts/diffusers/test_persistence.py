"""Stored graphs: other processes, exported folders, stores that fail."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from onediff_ext.building.build_progress import BuildProgress
from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.core.errors import OptionError, StoreError, StoreFullError, StoreReadOnlyError
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, new_session
from onediff_ext.hosts.diffusers.persistence import load_pipe, save_pipe
from tests.support import models
from tests.support.draw import draw_latents, relative_error
from tests.support.session_fixtures import InstantWorker
from tests.support.systems import needs_signals


def _draw_twice(pipe):
    draw_latents(pipe)
    return draw_latents(pipe)


def test_a_second_session_loads_everything(make_session, tmp_path):
    first = make_session(store=tmp_path)
    _draw_twice(compile_pipe(models.sd15(), session=first))
    second = make_session(store=tmp_path)
    _draw_twice(compile_pipe(models.sd15(), session=second))
    assert second.count("built") == 0
    assert second.count("loaded") == first.count("built") == len(second.kinds)
    assert {kind.state for kind in second.kinds} == {KindState.READY}


def test_saved_pipe_loads_into_another_store(make_session, tmp_path):
    pipe = compile_pipe(models.sd15(), session=make_session(store=tmp_path / "one"))
    folder = save_pipe(pipe, tmp_path / "saved")
    with pytest.raises(OptionError, match="already holds"):
        save_pipe(pipe, folder, overwrite=False)
    other = compile_pipe(models.sd15(), session=make_session(store=tmp_path / "two", build="never"))
    expected = draw_latents(models.sd15())
    load_pipe(other, folder)
    session = compiled_state(other).session
    session.build_context.new_worker = lambda cache, in_background: InstantWorker("eager", cache)
    assert relative_error(draw_latents(other), expected) < 1e-4
    assert session.wait_for_builds(240)  # what comes from elsewhere is tried by a worker first
    assert relative_error(_draw_twice(other), expected) < 1e-4
    assert session.count("loaded") == len([k for k in session.kinds if k.calls]) > 0
    with pytest.raises(StoreError, match="no saved graphs"):
        load_pipe(other, tmp_path / "empty")
    with pytest.raises(OptionError, match="not compiled"):
        save_pipe(models.sd15(), folder)


def test_saved_pipe_without_its_vae(make_session, tmp_path):
    pipe = compile_pipe(models.sd15(), session=make_session())
    everything = json.loads((save_pipe(pipe, tmp_path / "all") / "pipe.json").read_text())
    some = json.loads((save_pipe(pipe, tmp_path / "some", ignores="vae") / "pipe.json").read_text())
    assert set(some["kinds"]) < set(everything["kinds"])
    assert not any("Attention " in label for label in some["kinds"].values())


@pytest.mark.parametrize("error", [StoreFullError("no space"), StoreReadOnlyError("read-only")])
def test_graphs_that_cannot_be_kept_still_serve(make_session, tmp_path, monkeypatch, error):
    session = make_session(store=tmp_path)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(session.library, "put", fail)
    pipe = models.sd15()
    expected = draw_latents(pipe)
    compile_pipe(pipe, session=session, ignores="vae")
    assert relative_error(_draw_twice(pipe), expected) < 1e-4
    assert {kind.state for kind in session.kinds} == {KindState.READY}
    assert session.build_context.outcomes.warnings == [f"Graphs are not kept: {error}"]


def test_never_builds_when_told_so(make_session, tmp_path):
    session = make_session(store=tmp_path, build="never")
    pipe = models.sd15()
    expected = draw_latents(pipe)
    compile_pipe(pipe, session=session)
    assert relative_error(_draw_twice(pipe), expected) < 1e-4
    assert {kind.state for kind in session.kinds} == {KindState.MISSING}


def test_progress_counts_every_kind(make_session, tmp_path):
    session = make_session(store=tmp_path)
    seen: list[BuildProgress] = []
    session.listener = seen.append
    _draw_twice(compile_pipe(models.sd15(), session=session, ignores="vae"))
    assert [p.done for p in seen] == list(range(1, len(session.kinds) + 1))
    assert {p.needed for p in seen} == {len(session.kinds)}
    assert seen[-1].seconds_left == 0


def test_a_killed_worker_costs_its_kind_only(make_session, tmp_path, monkeypatch):
    session = make_session(store=tmp_path, workers=1)
    build_in, calls = session.build_context.build_in, []

    def kill_the_first(worker, program, device):
        calls.append(1)
        if len(calls) == 1:
            worker._start()
            worker._process.kill()
        return build_in(worker, program, device)

    monkeypatch.setattr(session.build_context, "build_in", kill_the_first)
    pipe = models.sd15()
    expected = draw_latents(pipe)
    compile_pipe(pipe, session=session, ignores="vae")
    assert relative_error(_draw_twice(pipe), expected) < 1e-4
    failed = [kind for kind in session.kinds if kind.state is KindState.FAILED]
    assert len(failed) <= 1
    assert all("killed by" in kind.reason for kind in failed)


@needs_signals
def test_a_hanging_worker_is_given_up(tmp_path, monkeypatch):
    from onediff_ext.core.errors import BackendError

    worker = WorkerProcess("eager", tmp_path)
    worker._start()
    process = worker._process
    os.kill(process.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(BackendError, match="longer than 1 s"):
        worker.build(b"", "cpu", timeout_s=1)
    assert time.monotonic() - start < 10
    assert process.poll() is not None
    worker.close()


@pytest.mark.starts_workers
def test_an_interrupt_ends_the_workers_at_once(tmp_path):
    pipe, options = models.sd15(), {"backend": "inductor", "build": "wait", "workers": 1}
    session = new_session({**options, "store": tmp_path})  # nothing kept: a worker has to build
    compile_pipe(pipe, session=session, ignores="vae")
    ended = threading.Event()

    def interrupt() -> None:
        while not _descendants():
            if ended.wait(0.1):
                return
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            draw_latents(pipe)
    finally:
        ended.set()
        thread.join()
    children = _descendants()
    assert children == []


def _descendants() -> list[str]:
    """Command lines of this process's living children (Linux)."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            for pid in file.read().split():
                with open(f"/proc/{pid}/cmdline") as command:
                    text = command.read().replace("\0", " ")
                if "start_worker.py" in text:
                    found.append(text)
    return found

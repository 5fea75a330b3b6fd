"""Exports that fail: in this process or a forked child, by a patch or for lack of memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import time

import numpy
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0

from onediff_ext.building import background_builds
from onediff_ext.building.builder import Builder
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from tests.support.build_checks import draw_all, nothing_is_held_against_a_kind
from tests.support.draw import relative_error
from tests.support.held_builds import builds_on_hold
from tests.support.ldm_stand_in import written_in
from tests.support.session_fixtures import SmallUNet
from tests.support.systems import needs_fork

TIMEOUT_S = 240
HERE_OR_FORKED = [0, pytest.param(2, marks=needs_fork)]
FEW_KINDS = {"widths": (64, 64, 64), "heads": 1}  # each kind is traced here


@pytest.fixture
def small() -> SmallUNet:
    """A small UNet that is not compiled yet."""
    return SmallUNet(**FEW_KINDS)


@pytest.fixture
def exports() -> None:
    """Every block is traced."""


def no_room(*args, **kwargs):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("children", HERE_OR_FORKED)
def test_a_patch_that_cannot_be_exported_is_not_remembered(
    open_session, small, instant_workers, monkeypatch, children
):
    attend = AttnProcessor2_0.__call__

    def foreign(*args, **kwargs):
        output = attend(*args, **kwargs)
        return output if float(output.abs().sum()) >= 0 else output * 2  # cannot be traced

    session = open_session()
    session.build_context.export_children = children
    with monkeypatch.context() as patch:
        # The method is there when its class is seen first, and looks like the class's own.
        hidden = written_in(foreign, AttnProcessor2_0.__module__)
        patch.setattr(AttnProcessor2_0, "__call__", hidden)
        compile_pipe(small.pipe, session=session)
        draw_all(session, small, rounds=8)
        refused = [kind for kind in session.kinds if kind.graph is None]
        assert refused
    assert nothing_is_held_against_a_kind(session)
    again = open_session()
    other = SmallUNet(seed=5, **FEW_KINDS)
    expected = other()
    compile_pipe(other.pipe, session=again)
    assert relative_error(draw_all(again, other), expected) < 1e-4
    assert {kind.state for kind in again.kinds} == {KindState.READY}


def test_a_block_that_cannot_be_exported_is_given_up_for_this_process(
    open_session, small, instant_workers, monkeypatch
):
    session = open_session(build_attempts=2)
    session.build_context.export_children = 0
    compile_pipe(small.pipe, session=session)
    monkeypatch.setattr(
        "onediff_ext.engine.running.kind_export.export_block",
        lambda *args: (_ for _ in ()).throw(KeyError("x")),
    )
    draw_all(session, small, rounds=6)
    assert {kind.state for kind in session.kinds} == {KindState.FAILED}
    tries = [e for e in session.event_log.events if e.what == "put off"]
    assert len(tries) == len(session.kinds)  # one of two
    assert nothing_is_held_against_a_kind(session)


@pytest.mark.parametrize("children", HERE_OR_FORKED)
def test_a_setting_that_changes_between_pictures(open_session, small, instant_workers, children):
    """A1111's "Tiling": kinds met with it are built once it is on again, and plain ones at once."""
    plain = small()
    convolutions = [m for m in small.unet.modules() if isinstance(m, torch.nn.Conv2d)]

    def tile(on: bool) -> None:
        for convolution in convolutions:
            convolution.padding_mode = "circular" if on else "zeros"
        for runner in runners:
            runner.weights.tree = None  # read again at the next call

    session = open_session()
    session.build_context.export_children = children
    compile_pipe(small.pipe, session=session)
    runners = compiled_state(small.pipe).components[0].runners
    tile(True)
    with builds_on_hold(session):
        with session.picture():
            tiled = small()
        tile(False)
    assert session.wait_for_builds(TIMEOUT_S)
    met = {kind for kind in session.kinds if kind.state is not KindState.READY}
    assert met
    assert {kind.state for kind in met} <= {KindState.MISSING, KindState.UNCHECKED}
    for _ in range(3):
        with session.picture():
            assert relative_error(small(), plain) < 1e-4
        assert session.wait_for_builds(TIMEOUT_S)
    status = session.status()
    assert (status.running, status.reasons) == ("compiled", ()), status
    tile(True)
    for _ in range(6):
        with session.picture():
            assert relative_error(small(), tiled) < 1e-4
        assert session.wait_for_builds(TIMEOUT_S)
    assert session.status().running == "compiled", session.status()
    assert {kind.state for kind in session.kinds} == {KindState.READY}


def test_a_kind_outlives_the_block_that_it_was_named_after(open_session, small, instant_workers):
    """Another checkpoint was loaded before the graphs of the first one were built."""
    session = open_session()
    compile_pipe(small.pipe, session=session)
    other = SmallUNet(seed=5, **FEW_KINDS)
    expected = other()
    with builds_on_hold(session):
        small()
        compile_pipe(other.pipe, session=session)
        other()
        undo_compile(small.pipe)
        small.unet = small._pipe = None
        gc.collect()
    assert session.wait_for_builds(TIMEOUT_S)
    assert relative_error(draw_all(session, other), expected) < 1e-4
    assert {kind.state for kind in session.kinds} == {KindState.READY}
    assert not [e for e in session.event_log.events if e.what == "put off"]


def random_states():
    return str((torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()))


def test_without_children_a_long_picture_has_its_blocks_exported_between_its_steps(
    open_session, small, instant_workers, monkeypatch
):
    """As on Windows. The picture stays what it is, and the numbers that its sampler draws."""
    monkeypatch.setattr(background_builds, "_FIRST_PICTURE_S", 0.0)
    expected = small()
    session = open_session()
    session.build_context.export_children = 0
    session.foreground._drawn_s = 3600.0  # the share of an hour is enough for all exports
    compile_pipe(small.pipe, session=session)
    ends_at = time.monotonic() + TIMEOUT_S
    with session.picture():
        before, built = random_states(), 0
        while built == 0 or built < len(session.kinds):
            assert time.monotonic() < ends_at
            assert torch.equal(small(), expected)
            built = sum(e.what == "built" for e in session.event_log.events)
        assert random_states() == before
        assert session.count("built") == 0  # graphs change between pictures
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)
    assert relative_error(small(), expected) < 1e-4


@needs_fork
def test_a_fork_without_memory_exports_in_this_process(
    open_session, small, instant_workers, monkeypatch
):
    monkeypatch.setattr("onediff_ext.building.exporting.os.fork", no_room)
    session = open_session()
    session.build_context.export_children = 2
    compile_pipe(small.pipe, session=session)
    descriptors = len(os.listdir("/proc/self/fd"))
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert session.count("built") == len(session.kinds)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@needs_fork
def test_a_second_fork_without_memory_waits_for_the_first(
    open_session, small, instant_workers, monkeypatch
):
    fork, forked, ended = os.fork, [], os.WEXITED | os.WNOWAIT | os.WNOHANG

    def one_at_a_time():
        with contextlib.suppress(ChildProcessError):  # it has ended
            if forked and not os.waitid(os.P_PID, forked[-1], ended):
                no_room()
        pid = fork()
        if pid:
            forked.append(pid)
        return pid

    monkeypatch.setattr(Builder, "detach", lambda *_: None)  # would be the first fork
    monkeypatch.setattr("onediff_ext.building.exporting.os.fork", one_at_a_time)
    here = []
    monkeypatch.setattr(
        "onediff_ext.building.exporting._export_here", lambda kind: here.append(kind) or no_room()
    )
    session = open_session()
    session.build_context.export_children = 3
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    assert not here
    assert session.count("built") == len(session.kinds)

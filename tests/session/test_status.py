"""The status reports the blocks that drew the last picture."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from onediff_ext.building.build_times import BuildTimes
from onediff_ext.core.status import Status
from onediff_ext.engine.blocks.block_kind import KindState, LiveBlocks
from onediff_ext.engine.machine import machine_digest
from onediff_ext.engine.running import block_runner
from onediff_ext.engine.running.block_runner import NO_GRAPH_YET
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.session.last_picture import Fallbacks
from tests.support import models
from tests.support.held_builds import builds_on_hold
from tests.support.session_fixtures import SmallUNet

TIMEOUT_S = 240


@pytest.fixture
def ready(open_session, small, instant_workers):
    """A session with a fully compiled small UNet."""
    session = open_session()
    compile_pipe(small.pipe, session=session)
    for _ in range(2):
        small()
        assert session.wait_for_builds(TIMEOUT_S)
    small()
    return session


def blocks_of(small):
    return [runner.block for runner in compiled_state(small.pipe).components[0].runners]


def test_before_and_after_the_graphs_came(open_session, small, instant_workers):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    assert session.status().blocks_needed == 0
    with builds_on_hold(session):
        small()
        count = len(blocks_of(small))
        status = session.status()
        assert (status.running, status.blocks_compiled, status.blocks_needed) == ("eager", 0, count)
        assert status.eager_blocks == ((NO_GRAPH_YET, count),)
        assert status.reasons == ()
    assert session.wait_for_builds(TIMEOUT_S)
    status = session.status()  # of the next picture, which will be drawn with them
    assert (status.running, status.blocks_compiled, status.eager_blocks) == ("compiled", count, ())
    assert status.line() == "compiled"


def test_blocks_that_an_extension_keeps_eager_are_counted(ready, small):
    count = len(blocks_of(small))
    hooked = [block for block in blocks_of(small) if hasattr(block, "attn1")]
    handles = [block.attn1.register_forward_hook(lambda *_: None) for block in hooked]
    with ready.picture():
        small()
    status = ready.status()
    assert status.running == "compiled in part"
    assert status.kinds_ready == status.kinds_needed  # which said "compiled" so far
    assert (status.blocks_compiled, status.blocks_needed) == (count - len(hooked), count)
    ((reason, blocks),) = status.eager_blocks
    assert blocks == len(hooked) > 0
    assert "hook or a replaced forward" in reason
    assert status.line().startswith(
        f"compiled in part, {count - len(hooked)} of {count} blocks (BasicTransformerBlock: "
    )
    assert reason in status.line()
    json = status.as_json()
    assert json["eager_blocks"] == [{"reason": reason, "blocks": blocks}]
    assert json["schema"] == 2
    for handle in handles:
        handle.remove()
    with ready.picture():
        small()
    assert ready.status().line() == "compiled"


def test_all_blocks_eager_is_not_compiled(ready, small):
    hooks = [
        module.register_forward_hook(lambda *_: None)
        for block in blocks_of(small)
        for module in block.children()
        if not isinstance(module, torch.nn.Dropout)
    ]
    small()
    status = ready.status()
    assert (status.running, status.blocks_compiled) == ("eager", 0)
    assert status.line().startswith("eager: ")
    for hook in hooks:
        hook.remove()


def test_only_what_drew_the_last_picture_counts(open_session, small, instant_workers):
    session, vae = open_session(), SimpleNamespace(vae=models.vae(seed=1))
    compile_pipe(small.pipe, session=session)
    compile_pipe(vae, session=session)
    latents = torch.randn(1, 4, 8, 8)
    for _ in range(3):
        with session.picture(), torch.no_grad():
            small()
            vae.vae.decode(latents)
        assert session.wait_for_builds(TIMEOUT_S)
    both = session.status()
    decoder = compiled_state(vae).components[1]
    with session.picture(), decoder.paused():
        small()
    assert session.status().blocks_needed == len(blocks_of(small))
    assert both.blocks_needed == both.blocks_compiled
    assert both.blocks_needed == len(blocks_of(small)) + len(decoder.runners)
    undo_compile(small.pipe)
    assert session.status().blocks_needed == 0


def test_measuring_eager_steps_leaves_the_status_alone(ready, small):
    with compiled_state(small.pipe).components[0].paused():
        small()
    assert ready.status().line() == "compiled"


def test_the_whole_build_takes_no_less_than_what_is_left(ready, monkeypatch):
    """The panel said "about 58 s left", and below it "built once: about 6 s"."""
    for kind in ready.kinds:  # as a machine that was idle, or another backend, has them
        machine = machine_digest(kind.device)
        ready.build_context.history.record_build(machine, "eager", kind.label, 0.5)
    run = SimpleNamespace(
        times=BuildTimes(),
        seconds_left=lambda: 58.0,  # beside pictures
        stage="building",
        building_now=(),
    )
    monkeypatch.setattr(ready.builder, "run", run)
    monkeypatch.setattr(ready.kinds[0], "source", "built")
    assert ready.status().first_builds_s == pytest.approx(58.0, abs=1)


def test_a_backend_that_is_not_there(open_session, small, instant_workers, monkeypatch):
    from onediff_ext.backends.registry import make_backend

    monkeypatch.setattr(
        "onediff_ext.session.session.choose_backend",
        lambda name: (make_backend("eager"), "OneFlow is not installed; eager builds the graphs"),
    )
    session = open_session()
    compile_pipe(small.pipe, session=session)
    for _ in range(3):
        small()
        assert session.wait_for_builds(TIMEOUT_S)
    since = session.fell_back_so_far()  # a WebUI asks for the reasons of one job
    small()
    status = session.status(since)
    assert status.running == "compiled"
    assert status.line() == "compiled; OneFlow is not installed; eager builds the graphs"
    assert status.as_json()["substituted"] == "OneFlow is not installed; eager builds the graphs"


def test_a_precision_that_cannot_be_had(open_session, small, instant_workers):
    session = open_session(precision="fp8")
    compile_pipe(small.pipe, session=session)
    for _ in range(3):
        small()
        assert session.wait_for_builds(TIMEOUT_S)
    since = session.fell_back_so_far()
    small()
    assert session.status(since).line() == "compiled; fp8 is for GPUs"


def test_lines_of_a_part():
    part = Status("compiled in part", 9, 0, 10, blocks_compiled=12, blocks_needed=28)
    assert part.line() == "compiled in part, 12 of 28 blocks"
    stored = Status("compiled in part", 13, 0, 24)
    assert stored.line() == "compiled in part, 13 of 24 graphs"
    building = Status(
        "compiled in part", 9, 0, 10, building=True, blocks_compiled=3, blocks_needed=28,
        reasons=("a",),
    )  # fmt: skip
    assert building.line() == "compiled in part, 3 of 28 blocks, building 9 of 10"


def test_cancelled_kinds_wait_and_later_ones_are_built(open_session, small, instant_workers):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    with builds_on_hold(session):
        small()
        canceller = threading.Thread(target=session.cancel_builds)
        canceller.start()
        time.sleep(0.1)
    canceller.join()
    cancelled = set(session.kinds)
    status = session.status()
    assert status.cancelled
    assert status.waiting == len(cancelled)
    assert f"{len(cancelled)} not built (cancelled)" in status.line()
    assert "the next picture has its missing graphs built" in status.line()
    small()
    assert not session.background.is_building
    vae = SimpleNamespace(vae=models.vae(seed=1))
    compile_pipe(vae, session=session)
    for _ in range(2):
        with session.picture(), torch.no_grad():
            vae.vae.decode(torch.randn(1, 4, 8, 8))
        assert session.wait_for_builds(TIMEOUT_S)
    later = set(session.kinds) - cancelled
    assert later
    assert {kind.state for kind in later} == {KindState.READY}
    assert {kind.state for kind in cancelled} == {KindState.MISSING}
    session.build_in_background()
    assert session.wait_for_builds(TIMEOUT_S)
    assert not session.status().cancelled
    assert all(kind.graph for kind in session.kinds)


def test_a_closed_session_builds_nothing(open_session, small, instant_workers):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    session.close()
    small()
    assert not session.background.is_building


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def beside(act, look, seconds=1.5):
    """Run two functions in two threads at the same time; return their errors."""
    errors, until = [], time.monotonic() + seconds

    def repeat(what):
        try:
            while time.monotonic() < until:
                what()
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=repeat, args=(what,)) for what in (act, look, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_blocks_are_met_while_others_look(many_switches):
    blocks, kept = LiveBlocks(), []

    def meet():
        kept.append(torch.nn.Identity())
        blocks.add(kept[-1])
        del kept[:-50]

    assert beside(meet, lambda: [list(blocks), len(blocks)]) == []


def test_calls_are_counted_while_others_look(many_switches):
    fallbacks, number = Fallbacks(), iter(range(10**9))
    since = Counter({("x", "y"): 1})
    assert (
        beside(lambda: fallbacks.add("a", str(next(number))), lambda: fallbacks.since(since)) == []
    )
    fallbacks = Fallbacks()
    threads = [
        threading.Thread(target=lambda: [fallbacks.add("a", "b") for _ in range(20_000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fallbacks.so_far()["a", "b"] == 80_000


def test_graphs_that_come_into_the_store_are_used_between_pictures(ready, open_session):
    session, other = open_session(build="never"), SmallUNet(seed=5)
    stored = {kind.key.digest: ready.library.get(kind.key) for kind in ready.kinds}
    get = session.library.get
    session.library.get = lambda key: None
    compile_pipe(other.pipe, session=session)
    other()
    session.library.get = get
    assert stored.keys() == {kind.key.digest for kind in session.kinds}
    with session.picture():
        session.load_missing()
        assert not any(kind.graph for kind in session.kinds)
    assert all(kind.graph for kind in session.kinds)


def test_a_thread_that_identified_an_older_block_leaves_nothing_behind(ready, small, monkeypatch):
    """A finding of another thread about a block is dropped when the block changes."""
    runner = compiled_state(small.pipe).components[0].runners[0]
    find_kind, changed = block_runner.find_kind, []

    def late(registry, family, block, tree, *args):
        if block is runner.block and not changed:
            changed.append(runner._read_block())  # another thread reads the block meanwhile
            assert changed[0] is not tree
        return find_kind(registry, family, block, tree, *args)

    monkeypatch.setattr(block_runner, "find_kind", late)
    runner._read_block()
    small()
    small()
    assert changed
    assert runner._found
    assert {key[0] for key in runner._found if key[0] is runner.tree}

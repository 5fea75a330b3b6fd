"""Graphs are built again while the machine is idle, and the faster ones are kept."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest
import torch

from onediff_ext.backends.eager import EagerBackend
from onediff_ext.building import idle_tuning
from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.worker_process import Tuned
from onediff_ext.core import power
from onediff_ext.core.errors import BackendError, MachineError, OneDiffError, WorkerLostError
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.hosts.diffusers.compile import compile_pipe
from tests.support.draw import relative_error
from tests.support.session_fixtures import InstantWorker, SmallUNet

TIMEOUT_S = 60
FEW_KINDS = {"widths": (64, 64, 64), "heads": 1}


@dataclass
class Machine:
    """What the workers of a test find.

    Args:
        before_ms, after_ms: What they measure for large pictures.
        small_ms: What they measure of the tuned graph for small pictures; 1 ms before.
        error: What they raise instead.
        asked: The program of each request.
        hold: A worker is at it until this is set, or until it is ended.
        not_held: So many requests are answered before one is held.
        is_idle: Whether other programs leave the processors alone.
    """

    before_ms: float = 2.0
    after_ms: float = 1.0
    small_ms: float = 1.0
    error: OneDiffError | None = None
    asked: list[object] = field(default_factory=list)
    hold: threading.Event | None = None
    not_held: int = 0
    is_idle: bool = False


class TuningWorker(InstantWorker):
    """Measures what the test says, without a process."""

    machine: Machine

    def __init__(self, machine, folder):
        super().__init__("eager", folder)
        self.machine, self.ended = machine, threading.Event()

    def tune(self, payload, program, device, timeout_s):
        machine = self.machine
        machine.asked.append(program)
        hold = machine.hold if len(machine.asked) > machine.not_held else None
        while hold is not None and not hold.wait(0.01):
            if self.ended.is_set():
                raise WorkerLostError("The worker was ended.")
        if machine.error is not None:
            raise machine.error
        before_ms, after_ms = (machine.before_ms, 1.0), (machine.after_ms, machine.small_ms)
        return Tuned(payload + b" ", 1.0, before_ms, after_ms)

    def close(self):
        self.ended.set()


@pytest.fixture
def machine(monkeypatch):
    """An idle machine on which the backend "eager" can tune its graphs."""
    found = Machine()
    monkeypatch.setattr(idle_tuning, "IDLE_S", 0.2)
    monkeypatch.setattr(idle_tuning, "_LOOK_S", 0.02)
    monkeypatch.setattr(idle_tuning, "are_processors_idle", lambda: found.is_idle)
    monkeypatch.setattr(idle_tuning, "is_on_battery", lambda: False)
    monkeypatch.setattr(EagerBackend, "tuning", lambda self, device: "with more effort")
    load = EagerBackend.load
    monkeypatch.setattr(
        EagerBackend, "load", lambda self, payload, device: load(self, payload.rstrip(b" "), device)
    )
    monkeypatch.setattr(
        BuildContext, "new_worker", lambda self, folder, in_background: TuningWorker(found, folder)
    )
    return found


@pytest.fixture
def small():
    """A UNet with few kinds, which is not compiled yet."""
    return SmallUNet(**FEW_KINDS)


@pytest.fixture
def drawn(machine, open_session, small):
    """A session whose graphs are all in use. It tunes them once the machine is idle."""
    session = open_session(tuning="idle")
    compile_pipe(small.pipe, session=session)
    expected = small()
    for _ in range(2):
        assert session.wait_for_builds(TIMEOUT_S)
        draw(session, small, expected)
    assert {kind.state for kind in session.kinds} == {KindState.READY}
    return session, expected


def draw(session, small, expected):
    with session.picture():
        assert relative_error(small(), expected) < 1e-4


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(session):
    return session.tuning._thread is None


def tunings(session):
    machine = machine_digest(torch.device("cpu"))
    records = session.build_context.build_records
    return [records.read(kind.key.digest).tunings.get(machine) for kind in session.kinds]


def stored(session):
    return [session.library.get(kind.key).payload for kind in session.kinds]


def test_faster_graphs_take_the_place_of_the_stored_ones(drawn, small, machine, open_session):
    session, expected = drawn
    machine.is_idle = True
    wait_for(lambda: ended(session))
    assert len(machine.asked) == len(session.kinds) > 2
    assert all(payload.endswith(b" ") for payload in stored(session))
    assert all((t.before_ms, t.after_ms) == (2.0, 1.0) for t in tunings(session))
    assert session.status().tuning_gain == pytest.approx(1.0)
    assert session.status().line() == "compiled (tuned, +100%)"
    draw(session, small, expected)
    assert {kind.state for kind in session.kinds} == {KindState.READY}
    time.sleep(0.5)
    assert ended(session)
    assert len(machine.asked) == len(session.kinds)

    later = open_session(tuning="idle")  # another process
    compile_pipe(small.pipe, session=later)
    draw(later, small, expected)
    assert later.count("loaded") == len(later.kinds)
    assert later.status().tuning_gain == pytest.approx(1.0)
    assert ended(later)


def test_their_first_call_is_compared_with_eager(drawn, small, machine, monkeypatch):
    session, expected = drawn
    load = EagerBackend.load

    def wrong(self, payload, device):
        graph = load(self, payload, device)
        return lambda arguments: [output + 1 for output in graph(arguments)]

    monkeypatch.setattr(EagerBackend, "load", wrong)
    machine.is_idle = True
    wait_for(lambda: ended(session))
    draw(session, small, expected)
    assert not any(kind.state is KindState.READY for kind in session.kinds)
    draw(session, small, expected)


@pytest.mark.parametrize(("after_ms", "small_ms"), [(1.99, 1.0), (3.0, 0.5), (1.0, 1.1)])
def test_what_is_not_faster_at_all_sizes_changes_nothing(drawn, small, machine, after_ms, small_ms):
    session, expected = drawn
    machine.after_ms, machine.small_ms = after_ms, small_ms
    graphs = {kind: kind.graph for kind in session.kinds}
    machine.is_idle = True
    wait_for(lambda: ended(session))
    assert not any(payload.endswith(b" ") for payload in stored(session))
    assert {kind: kind.graph for kind in session.kinds} == graphs
    assert {t.after_ms for t in tunings(session)} == {2.0}
    assert session.status().tuning_gain is None
    draw(session, small, expected)
    assert ended(session)
    assert len(machine.asked) == len(session.kinds)


def test_a_picture_ends_it_at_once(drawn, small, machine):
    session, expected = drawn
    machine.hold = threading.Event()
    machine.is_idle = True
    wait_for(lambda: machine.asked)
    assert f"tuning 0 of {len(session.kinds)} while idle" in session.status().line()
    with session.picture():
        start = time.monotonic()
        wait_for(lambda: not session.tuning.is_tuning)
        assert time.monotonic() - start < 5
        assert relative_error(small(), expected) < 1e-4
        assert len(machine.asked) == 1
    assert tunings(session) == [None] * len(session.kinds)
    machine.hold.set()
    wait_for(lambda: ended(session))
    assert all(t is not None for t in tunings(session))
    draw(session, small, expected)


def test_graphs_that_were_tuned_before_a_picture_are_used_once_all_are(drawn, small, machine):
    session, expected = drawn
    graphs = {kind: kind.graph for kind in session.kinds}
    machine.hold, machine.not_held = threading.Event(), 1
    machine.is_idle = True
    wait_for(lambda: len(machine.asked) == 2)
    draw(session, small, expected)
    assert sum(tuning is not None for tuning in tunings(session)) == 1
    assert {kind: kind.graph for kind in session.kinds} == graphs
    machine.hold.set()
    wait_for(lambda: ended(session))
    assert all(kind.graph is not graphs[kind] for kind in session.kinds)


def test_not_beside_other_programs(drawn, machine):
    session, _ = drawn
    time.sleep(0.5)
    assert not ended(session)
    assert machine.asked == []
    machine.is_idle = True
    wait_for(lambda: ended(session))
    assert len(machine.asked) == len(session.kinds)


def test_not_on_battery(drawn, machine, monkeypatch):
    session, _ = drawn
    monkeypatch.setattr(idle_tuning, "is_on_battery", lambda: True)
    machine.is_idle = True
    time.sleep(0.5)
    assert machine.asked == []
    machine.hold = threading.Event()
    monkeypatch.setattr(idle_tuning, "is_on_battery", lambda: False)
    wait_for(lambda: machine.asked)
    monkeypatch.setattr(idle_tuning, "is_on_battery", lambda: True)  # unplugged meanwhile
    wait_for(lambda: not session.tuning.is_tuning)
    assert tunings(session) == [None] * len(session.kinds)


@pytest.mark.parametrize(
    ("error", "is_remembered"),
    [(BackendError("It gives NaN."), True), (MachineError("The disk is full."), False)],
)
def test_what_fails_is_tried_once(drawn, small, machine, error, is_remembered):
    session, expected = drawn
    machine.error = error
    machine.is_idle = True
    wait_for(lambda: ended(session))
    assert {t is not None for t in tunings(session)} == {is_remembered}
    draw(session, small, expected)
    assert ended(session)
    assert len(machine.asked) == len(session.kinds)
    assert session.status().line() == "compiled"


def test_a_graph_that_is_not_stored_is_left_as_it_is(drawn, small, machine):
    session, expected = drawn
    for kind in session.kinds:
        session.library.delete(kind.key.digest)
    machine.is_idle = True
    wait_for(lambda: ended(session))
    assert machine.asked == []
    draw(session, small, expected)
    assert {kind.state for kind in session.kinds} == {KindState.READY}
    assert ended(session)


def test_without_room_nothing_is_tuned(drawn, machine, monkeypatch):
    session, _ = drawn
    monkeypatch.setattr(idle_tuning, "has_room_to_measure", lambda device: False)
    machine.is_idle = True
    time.sleep(1)
    assert machine.asked == []
    monkeypatch.setattr(idle_tuning, "has_room_to_measure", lambda device: True)
    wait_for(lambda: ended(session))
    assert len(machine.asked) == len(session.kinds)


def test_other_settings_are_another_attempt(drawn, small, machine, monkeypatch):
    session, expected = drawn
    machine.is_idle = True
    wait_for(lambda: ended(session))
    monkeypatch.setattr(EagerBackend, "tuning", lambda self, device: "with even more effort")
    draw(session, small, expected)
    wait_for(lambda: ended(session))
    assert len(machine.asked) == 2 * len(session.kinds)


@pytest.mark.parametrize("options", [{"tuning": "off"}, {"tuning": "idle", "build": "never"}])
def test_switched_off(drawn, small, machine, open_session, options):
    session, expected = drawn
    machine.is_idle = True
    session.close()
    other = open_session(**options)
    compile_pipe(small.pipe, session=other)
    draw(other, small, expected)
    time.sleep(0.5)
    assert ended(other)
    assert machine.asked == []


def test_at_once_where_somebody_asks(machine, open_session, small):
    session = open_session()
    compile_pipe(small.pipe, session=session)
    expected = small()
    for _ in range(2):
        assert session.wait_for_builds(TIMEOUT_S)
        draw(session, small, expected)
    heard: list[tuple[str, int]] = []
    count = len(session.kinds)
    assert session.tuning.tune_now(lambda *progress: heard.append(progress)) == count
    assert sorted(heard) == sorted((kind.label, count) for kind in session.kinds)
    draw(session, small, expected)
    assert {kind.state for kind in session.kinds} == {KindState.READY}
    assert session.status().line() == "compiled (tuned, +100%)"
    assert session.tuning.tune_now(lambda *progress: None) == 0


def test_a_closed_session_tunes_no_more(drawn, machine):
    session, _ = drawn
    machine.hold = threading.Event()
    machine.is_idle = True
    wait_for(lambda: machine.asked)
    session.close()
    assert ended(session)
    assert not session.tuning.is_tuning


def test_a_kind_that_another_process_builds_is_left_to_it(drawn, machine):
    session, _ = drawn
    first = max(session.kinds, key=lambda kind: kind.weight)
    with session.library.build_lock(first.key, 1.0):
        machine.is_idle = True
        wait_for(lambda: len(machine.asked) >= len(session.kinds) - 1)
        assert tunings(session)[session.kinds.index(first)] is None
    wait_for(lambda: ended(session))
    assert tunings(session)[session.kinds.index(first)] is not None


def test_batteries(tmp_path, monkeypatch):
    monkeypatch.setattr(power, "_SUPPLIES", tmp_path)
    assert not power.is_on_battery()
    for name, texts in {
        "AC": {"type": "Mains", "online": "0"},
        "hidpp": {"type": "Battery", "scope": "Device", "status": "Discharging"},
        "BAT0": {"type": "Battery", "status": "Charging"},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in texts.items():
            (tmp_path / name / file).write_text(f"{text}\n")
    assert not power.is_on_battery()
    (tmp_path / "BAT0" / "status").write_text("Discharging\n")
    assert power.is_on_battery()


def test_processors_that_compute_for_others(monkeypatch):
    monkeypatch.setattr(power, "usable_cores", lambda: 4)
    for load, is_idle in ((0.5, True), (3.0, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        assert power.are_processors_idle() is is_idle

"""Sessions of builds have lower priority than pictures; our own session keeps its priority."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onediff_ext.core.priority import SessionPriorities, quick_switches
from tests.support.systems import needs_sessions


def _nice_of(pid: int | str) -> int:
    """Read the nice value of the autogroup of a process: "/autogroup-12 nice 0".

    Skips the test where autogroups are switched off: the file is empty there.
    """
    file = Path(f"/proc/{pid}/autogroup")
    words = file.read_text(encoding="ascii").split() if file.exists() else []
    if not words:
        pytest.skip("no autogroups share the processors here")
    return int(words[-1])


@pytest.fixture(params=[True, False], ids=["own-session", "our-session"])
def child(request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=request.param
    )
    yield process.pid, request.param
    process.kill()
    process.wait()


@needs_sessions
def test_a_session_gives_way_and_takes_more_between_pictures(child: tuple[int, bool]) -> None:
    pid, own = child
    ours, giving_way, seen = _nice_of("self"), SessionPriorities(), []
    for drawing in (True, True, False):
        giving_way.tell(pid, drawing)
        seen.append(_nice_of(pid))
        time.sleep(0.15)  # the system takes such an order ten times a second
    assert _nice_of("self") == ours
    assert seen == ([15, 15, 5] if own else [ours] * 3)


def test_a_process_that_has_ended_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    SessionPriorities().tell(process.pid, True)


def test_threads_take_turns_often_until_the_last_that_asked_is_done() -> None:
    usual = sys.getswitchinterval()
    with quick_switches():
        with quick_switches():
            assert sys.getswitchinterval() < usual / 10
        assert sys.getswitchinterval() < usual / 10
    assert sys.getswitchinterval() == usual

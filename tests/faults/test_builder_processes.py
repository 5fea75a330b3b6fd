"""Building processes that are killed, or that share a store and build the same kinds."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session
from onediff_ext.store import GraphLibrary
from tests.support import slow_worker
from tests.support.kept_exports import kept_exports
from tests.support.processes import processes_with
from tests.support.quick_builds import quick_loads
from tests.support.session_fixtures import SmallUNet

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(os, "fork"),
    reason="needs fork, SIGKILL and /proc, so Linux",
)

KILLS = 50
GONE_WITHIN_S = 5.0
LIMIT_BYTES = 1 << 30


class SlowWorker(WorkerProcess):
    """A real worker process with a build that only takes time."""

    script = Path(slow_worker.__file__)


class Drawer:
    """A process that draws and builds in the background, and reports what it has saved.

    Args:
        store, tmp: Its store, and its folder for temporary files.
        small: What it draws with.
        programs: By digest, so that nothing is exported again.
        linger: Stay alive when all is built, until killed.
    """

    def __init__(
        self, store: Path, tmp: Path, small: SmallUNet, programs: dict[str, bytes], linger: bool
    ) -> None:
        self._read, self._write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._read)
                with quick_loads():
                    self._draw(store, tmp, small, programs, linger)
                status = 0
            finally:
                os._exit(status)
        os.close(self._write)

    def _draw(
        self, store: Path, tmp: Path, small: SmallUNet, programs: dict[str, bytes], linger: bool
    ) -> None:
        tempfile.tempdir = str(tmp)
        BuildContext.new_worker = lambda self, cache, in_background: SlowWorker(  # type: ignore[method-assign]
            "eager", cache, in_background
        )
        BlockKind.export = lambda kind: programs[kind.key.digest]  # type: ignore[method-assign]
        options = CompileOptions(backend="eager", store=store, workers=2)
        session = new_session(options)
        session.build_context.export_children = 0
        put = session.library.put

        def put_and_report(key, payload, **details):
            stored = put(key, payload, **details)
            os.write(self._write, key.digest.encode() + b"\n")
            return stored

        session.library.put = put_and_report  # type: ignore[method-assign]
        compile_pipe(small.pipe, session=session)
        small()
        while True:
            session.wait_for_builds(60)
            if not session.missing():
                break
        if linger:
            time.sleep(60)
        session.close()

    def finish(self, timeout_s: float = 120) -> list[str]:
        """Wait until it ends; returns the digests that it reported as saved."""
        deadline = time.monotonic() + timeout_s
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError("it did not end")
            time.sleep(0.01)
        return self._reported()

    def kill(self) -> list[str]:
        """Kill it at once; returns the digests that it reported as saved."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return self._reported()

    def _reported(self) -> list[str]:
        with os.fdopen(self._read) as pipe:
            # An incomplete line does not count as reported.
            return [line.strip() for line in pipe if line.endswith("\n")]


def wait_until_gone(tmp: Path) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while processes_with("TMPDIR", tmp, or_below=True):
        assert time.monotonic() < deadline, "workers outlive the process that draws"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def programs() -> dict[str, bytes]:
    """The programs of the small UNet, exported once."""
    small = SmallUNet()
    with tempfile.TemporaryDirectory() as folder, kept_exports():
        options = CompileOptions(backend="eager", store=Path(folder), build="never")
        session = new_session(options)
        compile_pipe(small.pipe, session=session)
        small()
        return {kind.key.digest: kind.export() for kind in session.kinds}


@pytest.fixture
def start(tmp_path: Path, programs: dict[str, bytes]) -> Callable[..., Drawer]:
    """Start a process over one store."""
    small = SmallUNet()
    tmp = tmp_path / "tmp"
    tmp.mkdir()

    def start(store: str = "store", linger: bool = False) -> Drawer:
        return Drawer(tmp_path / store, tmp, small, programs, linger)

    return start


def nothing_is_left(tmp_path: Path, library: GraphLibrary) -> None:
    wait_until_gone(tmp_path / "tmp")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list(library.folder.tmp.iterdir()) == []
    assert {path.name for path in library.folder.locks.folder.iterdir()} <= {"guard.lock"}


def test_fifty_kills_while_building_and_saving(start, tmp_path, programs):
    chance = random.Random(11)
    generation, saved, finished = 0, set(), 0
    for turn in range(KILLS):
        library = GraphLibrary(tmp_path / f"store-{generation}", LIMIT_BYTES)
        drawer = start(f"store-{generation}", linger=True)
        time.sleep(chance.uniform(0.05, 1.5))
        reported = drawer.kill()
        assert saved.isdisjoint(reported), f"built again after kill {turn}"
        assert len(reported) == len(set(reported))
        saved |= set(reported)
        wait_until_gone(tmp_path / "tmp")
        assert library.verify() == [], turn
        assert {graph.digest for graph in library.entries()} >= saved, turn
        if saved == set(programs):
            finished, generation, saved = finished + 1, generation + 1, set()
    # The next start builds the rest, and sweeps the leftovers of the killed processes.
    library = GraphLibrary(tmp_path / f"store-{generation}", LIMIT_BYTES)
    time.sleep(2.1)  # a build folder that was made a moment ago may be somebody's
    reported = start(f"store-{generation}").finish()
    assert saved.isdisjoint(reported)
    assert {graph.digest for graph in library.entries()} == set(programs)
    assert library.verify() == []
    nothing_is_left(tmp_path, library)
    assert generation == finished


def test_what_a_killed_process_left_goes_though_nothing_is_to_be_built(start, tmp_path, programs):
    assert sorted(start().finish()) == sorted(programs)
    library = GraphLibrary(tmp_path / "store", LIMIT_BYTES)
    folder = tmp_path / "tmp" / "onediff-build-abcdefgh"
    folder.mkdir()
    (folder / "owner.lock").touch()
    part = library.folder.tmp / "0123.part"
    part.write_bytes(b"half")
    assert start().finish() == []
    nothing_is_left(tmp_path, library)


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_build_each_kind_once(start, tmp_path, programs, count):
    drawers = [start() for _ in range(count)]
    reported = [digest for drawer in drawers for digest in drawer.finish()]
    assert sorted(reported) == sorted(programs)
    library = GraphLibrary(tmp_path / "store", LIMIT_BYTES)
    assert library.verify() == []
    nothing_is_left(tmp_path, library)

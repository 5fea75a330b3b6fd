"""Kills at named fault points: ``python -m tests.faults.kills --count N``.

Each turn forks a process that writes files of all kinds and is killed, by SIGKILL, at one of the
points that `onediff_ext.core.fault_points` names. Afterwards each file is whole, and it is the
last one that was reported as written or the one that was being written; once the next run has
cleared up, nothing else is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from PIL import Image

from onediff_ext.cli.report_file import check_report_path, write_json
from onediff_ext.core import fault_points
from onediff_ext.core.kind_key import KindKey
from onediff_ext.pictures import writing
from onediff_ext.pictures.batch.resume import is_done
from onediff_ext.store import BuildRecords, CheckpointRecords, GraphLibrary

_STORE_POINTS = ("prepared", "opened", "wrote", "synced", "replaced", "folder synced")
POINTS = {
    "graph": _STORE_POINTS,
    "checkpoint": _STORE_POINTS,
    "verdict": _STORE_POINTS,
    "picture": ("opened", "wrote", "synced", "replaced", "folder synced"),
    "report": ("opened", "wrote", "synced", "replaced"),
}
_NAMES = 4  # files of each kind
_OPERATIONS = 12  # before the one that is killed, at most
_PICTURE = Image.new("RGB", (32, 24), "teal")
_WHAT_STAYS = {
    "schema.json", "graphs", "checkpoints", "verdicts", "compiler-files", "tmp", "locks"
}  # fmt: skip

Written = dict[tuple[str, int], set[int]]


class Files:
    """One of each: a store, a folder of pictures and a report."""

    def __init__(self, folder: Path) -> None:
        self.pictures, self.report = folder / "out", folder / "report.json"
        self.library = GraphLibrary(folder / "store", 1 << 30)
        self.build_records = BuildRecords(self.library.folder)
        self.records = CheckpointRecords(self.library.folder)

    def write(self, kind: str, name: int, turn: int) -> None:
        """Write one file, with `turn` in it."""
        if kind == "graph":
            key = _key(name)
            with self.library.build_lock(key, 10):
                self.library.put(
                    key, _payload(turn), label="L", backend="b", build_seconds=1, details={}
                )
        elif kind == "checkpoint":
            self.records.record(_digest(name), name=str(turn), path="", architecture="", kinds={})
        elif kind == "verdict":
            self.build_records.record_failure(
                _digest(name), "L", str(turn), attempts=1, version="1"
            )
        elif kind == "picture":
            path = self.pictures / f"{name}.png"
            writing.write_png(path, _PICTURE, infotext="", digest=_digest(turn))
        else:
            write_json(self.report, {"turn": turn, "more": ["x" * 100] * 100})

    def read(self, kind: str, name: int, turns: set[int]) -> int | None:
        """Which of some turns wrote a file; None when there is none; fails for any other state."""
        if kind == "graph":
            graph = self.library.get(_key(name))
            found = [turn for turn in turns if graph and graph.payload == _payload(turn)]
            return _one(found, graph is not None)
        if kind == "checkpoint":
            record = self.records.read(_digest(name))
            return None if record is None else int(record.name)
        if kind == "verdict":
            failure = self.build_records.read(_digest(name)).failure
            return None if failure is None else int(failure.reason)
        if kind == "picture":
            path = self.pictures / f"{name}.png"
            return _one([t for t in turns if is_done(path, _digest(t))], path.exists())
        if not self.report.exists():
            return None
        return int(json.loads(self.report.read_bytes())["turn"])

    def check(self, written: Written) -> None:
        """Look at every file, clear up as the next run does, and look for what is left.

        Raises:
            AssertionError: Something is damaged, lost or left over.
        """
        problems = GraphLibrary(self.library.folder.root, 1 << 30).verify()
        assert not problems, problems
        for (kind, name), turns in written.items():
            found = self.read(kind, name, turns)
            assert found in turns or (found is None and 0 in turns), (kind, name, found, turns)
            turns.intersection_update({found or 0})
            turns.add(found or 0)
        if self.library.folder.exists():
            GraphLibrary(self.library.folder.root, 1 << 30).sweep()
            home = self.library.folder.root
            assert {path.name for path in home.iterdir()} <= _WHAT_STAYS, list(home.iterdir())
            assert list((home / "tmp").iterdir()) == []
            assert {path.name for path in (home / "locks").iterdir()} <= {"guard.lock"}
        for path in self.pictures.glob(".*"):
            os.utime(path, (1, 1))  # as if some minutes had passed
        writing.make_folder(self.pictures)
        assert all(path.suffix == ".png" for path in self.pictures.iterdir())
        check_report_path(self.report)
        assert not list(self.report.parent.glob("*.part"))


def one_turn(files: Files, written: Written, chance: random.Random, turn: int) -> str:
    """Kill one process at a random point, and check; return the point's name."""
    kind = chance.choice(list(POINTS))
    point, nth = chance.choice(POINTS[kind]), chance.randrange(1, 3)
    operations = [
        (chance.choice(list(POINTS)), chance.randrange(_NAMES))
        for _ in range(chance.randrange(_OPERATIONS))
    ]
    # One write comes to a point once or twice, so these are enough.
    operations += [(kind, chance.randrange(_NAMES)) for _ in range(2)]
    reading, writing_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _write_until_killed(files, operations, turn * 100, (kind, point, nth), writing_end)
    os.close(writing_end)
    with os.fdopen(reading) as told:
        lines = told.read().splitlines()
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), (kind, point, nth, status)
    assert os.WTERMSIG(status) == signal.SIGKILL, (kind, point, nth, status)
    for line in lines:
        word, what, name, value = line.split()
        turns = written.setdefault((what, int(name)), {0})
        if word == "done":
            turns.clear()
        turns.add(int(value))
    files.check(written)
    return f"{kind}: {point}"


def _write_until_killed(
    files: Files,
    operations: list[tuple[str, int]],
    turn: int,
    end: tuple[str, str, int],
    tell: int,
) -> NoReturn:
    kind_now, seen = "", Counter[tuple[str, str]]()

    def kill(point: str) -> None:
        seen[kind_now, point] += 1
        if (kind_now, point, seen[kind_now, point]) == end:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        fault_points.hook = kill
        for step, (kind_now, name) in enumerate(operations, 1):
            value = turn + step
            os.write(
                tell, f"start {kind_now} {'0' if kind_now == 'report' else name} {value}\n".encode()
            )
            files.write(kind_now, name, value)
            os.write(
                tell, f"done {kind_now} {'0' if kind_now == 'report' else name} {value}\n".encode()
            )
    except BaseException as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
    finally:
        os._exit(1)


def run(count: int, seed: int, folder: Path, say: Callable[[str], None] = print) -> Counter[str]:
    """Kill `count` processes over one set of files; return how often at each point.

    Raises:
        AssertionError: Something is damaged, lost or left over.
    """
    files, chance = Files(folder), random.Random(seed)
    written: Written = {}
    kills: Counter[str] = Counter()
    start = time.monotonic()
    for turn in range(1, count + 1):
        kills[one_turn(files, written, chance, turn)] += 1
        if turn % 100 == 0:
            say(f"{turn} kills, {time.monotonic() - start:.0f} s")
    return kills


def _key(name: int) -> KindKey:
    return KindKey({"number": str(name)})


def _payload(turn: int) -> bytes:
    return b"%d " % turn * 5000


def _digest(number: int) -> str:
    return f"{number:064x}"


def _one(found: list[int], exists: bool) -> int | None:
    assert len(found) == exists, "neither what was there nor what was being written"
    return found[0] if found else None


def main() -> int:
    """Parse, kill, say how often and where."""
    parser = argparse.ArgumentParser(description="Kill writers at named fault points.")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onediff-kills-") as folder:
        kills = run(arguments.count, arguments.seed, Path(folder))
    for point, times in sorted(kills.items()):
        print(f"{times:6} {point}")
    print(f"{sum(kills.values())} kills at {len(kills)} points: all files whole, nothing left over")
    return 0


if __name__ == "__main__":
    sys.exit(main())

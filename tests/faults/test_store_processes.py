"""Several processes over one store, some of which die."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from filelock import BaseFileLock, FileLock, Timeout

from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary, StoreBusyError, durable_write
from onediff_ext.store import locks as locks_module
from onediff_ext.store.atomic_write import STALE_PART_AGE_S, collect_stale_parts
from onediff_ext.store.locks import StoreLocks
from tests.support.systems import needs_fork

MB = 1 << 20


def key_of(number: int) -> KindKey:
    return KindKey({"number": str(number)})


def payload_of(number: int) -> bytes:
    return b"%d" % number * 20_000


def put(library: GraphLibrary, number: int) -> None:
    library.put(
        key_of(number), payload_of(number), label="L", backend="b", build_seconds=1, details={}
    )


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        outputs.append(output)
    return outputs


def lock_files(library: GraphLibrary) -> list[str]:
    return sorted(path.name for path in library.folder.locks.folder.iterdir())


BUILD = """
import random, sys, time
from pathlib import Path
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary
root, kinds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
library = GraphLibrary(root, 1 << 30)
order = list(range(kinds))
random.Random(seed).shuffle(order)
for number in order:
    key = KindKey({"number": str(number)})
    if library.get(key) is None:
        with library.build_lock(key, 60):
            if library.get(key) is None:
                print(number)
                time.sleep(0.03)
                library.put(key, b"%d" % number * 20_000, label="L", backend="b",
                            build_seconds=1, details={})
    assert library.get(key).payload == b"%d" % number * 20_000
    library.prune()
"""


@pytest.mark.parametrize("process_count", [2, 4])
def test_each_kind_is_built_exactly_once(tmp_path: Path, process_count: int) -> None:
    kinds = 12
    outputs = finish([start(BUILD, tmp_path / "s", kinds, seed) for seed in range(process_count)])
    built = Counter(line for output in outputs for line in output.split())
    assert built == {str(number): 1 for number in range(kinds)}
    library = GraphLibrary(tmp_path / "s", MB)
    assert library.verify() == []
    assert lock_files(library) == ["guard.lock"]


STRESS = """
import random, sys, time
from pathlib import Path
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary
root, seed = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)
library = GraphLibrary(root, 150_000)
end = time.monotonic() + 2.5
while time.monotonic() < end:
    number = chance.randrange(8)
    key = KindKey({"number": str(number)})
    action = chance.choice(["put", "get", "get", "prune", "delete", "list", "verify"])
    if action == "put":
        library.put(key, b"%d" % number * 20_000, label="L", backend="b", build_seconds=1,
                    details={})
    elif action == "get":
        graph = library.get(key)
        assert graph is None or graph.payload == b"%d" % number * 20_000
        assert "damaged" not in library.explain(key)
    elif action == "prune":
        library.prune(limit_bytes=chance.choice([40_000, 100_000]))
    elif action == "delete":
        library.delete(key.digest)
    elif action == "list":
        library.entries()
    else:
        assert library.verify() == []
"""


@pytest.mark.parametrize("process_count", [2, 4])
def test_no_process_ever_sees_damage(tmp_path: Path, process_count: int) -> None:
    finish([start(STRESS, tmp_path / "s", seed) for seed in range(process_count)])
    library = GraphLibrary(tmp_path / "s", MB)
    assert library.verify() == []
    assert sum(graph.size_bytes for graph in library.entries()) <= 150_000
    assert list(library.folder.tmp.iterdir()) == []
    assert lock_files(library) == ["guard.lock"]


COUNT = """
import sys
from pathlib import Path
from onediff_ext.store.locks import StoreLocks
folder, counter = Path(sys.argv[1]), Path(sys.argv[2])
locks = StoreLocks(folder)
for turn in range(60):
    with locks.hold("counter", 60):
        value = int(counter.read_text())
        counter.write_text(str(value + 1))
    locks.collect()
"""


def test_removing_lock_files_never_lets_two_in(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    (tmp_path / "locks").mkdir()
    finish([start(COUNT, tmp_path / "locks", counter) for _ in range(3)])
    assert counter.read_text() == "180"


def test_lock_files_are_opened_and_removed_under_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The moment between opening and locking a file is too short to hit by chance.
    locks, seen = StoreLocks(tmp_path), []
    take, remove = StoreLocks._try, locks_module._remove

    def guard_is_held() -> bool:
        try:
            FileLock(str(tmp_path / "guard.lock"), thread_local=False).acquire(blocking=False)
        except Timeout:
            return True
        return False

    def watched_take(self: StoreLocks, name: str) -> BaseFileLock | None:
        seen.append(("take", guard_is_held()))
        return take(self, name)

    def watched_remove(path: Path) -> None:
        seen.append(("remove", guard_is_held()))
        remove(path)

    monkeypatch.setattr(StoreLocks, "_try", watched_take)
    monkeypatch.setattr(locks_module, "_remove", watched_remove)
    with locks.hold("a", 1):
        pass
    (tmp_path / "left.lock").touch()
    assert locks.collect() == 1
    assert seen == [("take", True), ("remove", True)] * 2


def test_a_lock_excludes_and_times_out(tmp_path: Path) -> None:
    library, other = GraphLibrary(tmp_path / "s", MB), GraphLibrary(tmp_path / "s", MB)
    with library.build_lock(key_of(1), 1):
        started = time.monotonic()
        with pytest.raises(StoreBusyError) as caught, other.build_lock(key_of(1), 0.2):
            pass
        assert 0.2 <= time.monotonic() - started < 5
        assert caught.value.hint
        with other.build_lock(key_of(2), 0):
            pass
    with other.build_lock(key_of(1), 0):
        pass


def test_the_guard_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onediff_ext.store.locks.GUARD_TIMEOUT_S", 0.1)
    with StoreLocks(tmp_path).guard(), pytest.raises(StoreBusyError), StoreLocks(tmp_path).guard():
        pass


HOLD = """
import sys, time
from pathlib import Path
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary
with GraphLibrary(Path(sys.argv[1]), 1 << 20).build_lock(KindKey({"number": "1"}), 5):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_dead_builder_is_free_and_collected(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path / "s")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    library = GraphLibrary(tmp_path / "s", MB)
    name = f"build-{key_of(1).digest}.lock"
    library.prune()
    assert name in lock_files(library), "a live holder's lock file stays"
    process.kill()
    process.communicate()
    with library.build_lock(key_of(1), 1):
        pass
    assert lock_files(library) == ["guard.lock"]
    (library.folder.locks.folder / name).touch()
    library.prune()
    assert lock_files(library) == ["guard.lock"]


def test_parts_are_collected_when_old_and_their_writer_is_dead(tmp_path: Path) -> None:
    library = GraphLibrary(tmp_path / "s", MB)
    put(library, 1)
    parts = {name: library.folder.tmp / f"{name}.part" for name in ("dead", "young", "live")}
    old = time.time() - STALE_PART_AGE_S - 1
    for name, part in parts.items():
        part.write_bytes(b"half")
        if name != "young":
            os.utime(part, (old, old))
    with library.folder.locks.hold("write-live", 1):
        assert library.prune().part_count == 1
    assert not parts["dead"].exists()
    assert parts["young"].exists()
    assert parts["live"].exists()
    assert library.prune().part_count == 1


class SlowDisk:
    """The module `os`, writing little by little, so that a kill strikes half way."""

    def write(self, descriptor: int, chunk: memoryview) -> int:
        time.sleep(0.0003)
        return os.write(descriptor, chunk[:1000])

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


def writer(root: Path, seed: int) -> None:
    durable_write.os = SlowDisk()  # type: ignore[assignment]  # in this forked process only
    chance = random.Random(seed)
    library = GraphLibrary(root, 200_000)
    while True:
        number = chance.randrange(8)
        with library.build_lock(key_of(number), 10):
            put(library, number)
        if chance.random() < 0.2:
            library.prune(limit_bytes=60_000)


@needs_fork
def test_fifty_writers_killed_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(7)
    root = tmp_path / "s"
    for turn in range(50):
        child = os.fork()
        if child == 0:
            try:
                writer(root, turn)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        library = GraphLibrary(root, 200_000)
        assert library.verify() == [], turn
        for graph in library.entries():
            got = library.get(graph.key)
            assert got is not None
            assert got.payload == payload_of(int(graph.key.entries["number"]))
    # The leftovers of dead processes hold no locks and can be swept.
    library = GraphLibrary(root, MB)
    for number in range(8):
        with library.build_lock(key_of(number), 0):
            put(library, number)
    collect_stale_parts(library.folder, age_s=0)
    library.prune()
    assert list(library.folder.tmp.iterdir()) == []
    assert lock_files(library) == ["guard.lock"]
    assert len(library.entries()) == 8

"""The power goes at any point while the store is written: its reader finds only whole files."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import (
    BuildRecords,
    CheckpointRecords,
    GraphLibrary,
    atomic_write,
    durable_write,
)
from onediff_ext.store import folder as folder_module
from tests.faults.power_loss import Change, Recorder, crashed

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="POSIX's calls are recorded"),
    pytest.mark.timeout(400),
]

MB = 1 << 20
A, B = KindKey({"number": "A"}), KindKey({"number": "B"})
CHECKPOINT = "0" * 64
TRIES = 3  # of each model at each point


def payload(generation: int) -> bytes:
    return b"%d" % generation * 3000


def put(library: GraphLibrary, key: KindKey, generation: int) -> None:
    library.put(key, payload(generation), label="L", backend="b", build_seconds=1, details={})


def write_all(disk: Path, patch: pytest.MonkeyPatch) -> list[Change]:
    """A new store, with graphs and records, some of them replaced."""
    recorder = Recorder(disk)
    with recorder.recording(patch):
        library = GraphLibrary(disk / "home" / "store", MB)
        for turn in (1, 2):
            put(library, A, turn)
            recorder.done(f"A {turn}")
            CheckpointRecords(library.folder).record(
                CHECKPOINT, name=str(turn), path="", architecture="", kinds={}
            )
            recorder.done(f"checkpoint {turn}")
            BuildRecords(library.folder).record_failure(
                A.digest, "L", str(turn), attempts=1, version="1"
            )
            recorder.done(f"verdict {turn}")
        put(library, B, 1)
        recorder.done("B 1")
    return recorder.changes


def check(disk: Path, told: dict[str, int]) -> None:
    """Read the store after a cut.

    Args:
        told: What the program was told is written, and the last turn of it.
    """
    root = disk / "home" / "store"
    library = GraphLibrary(root, MB)
    assert library.verify() == []
    for name, key in (("A", A), ("B", B)):
        graph = library.get(key)
        allowed = [payload(turn) for turn in range(max(1, told.get(name, 0)), 3)]
        assert graph is None or graph.payload in allowed
        assert graph is not None or name not in told, f"{name} is lost"
    record = CheckpointRecords(library.folder).read(CHECKPOINT)
    assert int(record.name if record else 0) >= told.get("checkpoint", 0)
    failure = BuildRecords(library.folder).read(A.digest).failure
    assert int(failure.reason if failure else 0) >= told.get("verdict", 0)
    library.sweep()
    put(library, A, 3)
    graph = GraphLibrary(root, MB).get(A)
    assert graph is not None
    assert graph.payload == payload(3)
    assert json.loads((root / "schema.json").read_bytes())["schema"] == 1
    assert list((root / "tmp").iterdir()) == []


def replay(changes: list[Change], folder: Path, tries: int) -> int:
    """Cut the power after each change, several times by each model; return how often."""
    chance, cuts = random.Random(1), 0
    for end in range(len(changes) + 1):
        told: dict[str, int] = {}
        for change in changes[:end]:
            if change.what == "done":
                name, turn = change.content.decode().split()
                told[name] = int(turn)
        for reordering in (False, True):
            for _ in range(tries):
                cuts += 1
                disk = folder / str(cuts)
                disk.mkdir()
                crashed(changes[:end], disk, reordering=reordering, chance=chance)
                check(disk, told)
    return cuts


def test_no_cut_damages_or_loses_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk" / "home").mkdir(parents=True)
    changes = write_all(tmp_path / "disk", monkeypatch)
    assert {change.what for change in changes} == {
        "mkdir", "create", "write", "sync", "sync folder", "rename", "done",
    }  # fmt: skip
    changes = [Change("mkdir", "home"), Change("sync folder", "."), *changes]
    (tmp_path / "cuts").mkdir()
    assert replay(changes, tmp_path / "cuts", TRIES) > 500


@pytest.mark.parametrize("without", ["file", "folder of a new file", "new folders"])
def test_a_missing_sync_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """Planted faults: without any one of the three kinds of sync, some cut loses something."""
    if without == "file":
        write = durable_write.write_and_sync

        def unsynced(path: Path, chunks: list[bytes]) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(durable_write.os, "fsync", lambda descriptor: None)
                write(path, chunks)

        monkeypatch.setattr(atomic_write, "write_and_sync", unsynced)
    else:
        module = atomic_write if without == "folder of a new file" else folder_module
        monkeypatch.setattr(module, "sync_folder", lambda folder: None)
    (tmp_path / "disk" / "home").mkdir(parents=True)
    changes = write_all(tmp_path / "disk", monkeypatch)
    changes = [Change("mkdir", "home"), Change("sync folder", "."), *changes]
    (tmp_path / "cuts").mkdir()
    with pytest.raises(AssertionError):
        replay(changes, tmp_path / "cuts", TRIES)

"""Checkpoint records and content hashes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from onediff_ext.core.errors import CheckpointError, OptionError, StoreError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.records import CheckpointRecord, KindUse
from onediff_ext.store import CheckpointRecords, ContentHashes, GraphLibrary
from onediff_ext.store import checkpoints as checkpoints_module
from onediff_ext.store import content_hash as content_hash_module
from onediff_ext.store.folder import StoreFolder

MODEL, KIND_A, KIND_B = "a" * 64, "1" * 64, "2" * 64


@pytest.fixture
def folder(tmp_path: Path) -> StoreFolder:
    return StoreFolder(tmp_path / "store")


@pytest.fixture
def records(folder: StoreFolder) -> CheckpointRecords:
    return CheckpointRecords(folder)


def note(
    records: CheckpointRecords, kinds: dict[str, int], now_s: float, path: str = "/m/x.safetensors"
) -> CheckpointRecord:
    return records.record(MODEL, name="x", path=path, architecture="SDXL", kinds=kinds, now_s=now_s)


def test_reading_creates_nothing(records: CheckpointRecords) -> None:
    assert records.read(MODEL) is None
    assert records.list() == []
    assert records.delete(MODEL) is False
    assert not records.folder.root.exists()


def test_records_are_merged(records: CheckpointRecords) -> None:
    note(records, {KIND_A: 3}, now_s=10)
    merged = note(records, {KIND_B: 4}, now_s=20, path="/moved")
    assert merged.kinds == {KIND_A: KindUse(3, 10), KIND_B: KindUse(4, 20)}
    assert merged.path == "/moved"
    assert records.read(MODEL) == merged
    assert note(records, {KIND_A: 5}, now_s=30).kinds[KIND_A] == KindUse(5, 30)
    assert records.delete(MODEL) is True
    assert records.read(MODEL) is None


def test_the_oldest_kinds_are_forgotten(
    records: CheckpointRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_module, "MAX_KINDS", 1)
    note(records, {KIND_A: 1}, now_s=10)
    assert set(note(records, {KIND_B: 1}, now_s=20).kinds) == {KIND_B}


def test_listing_names_the_graphs_that_are_missing(tmp_path: Path) -> None:
    library = GraphLibrary(tmp_path / "store", 1 << 20)
    records = CheckpointRecords(library.folder)
    key = KindKey({"a": "b"})
    library.put(key, b"x", label="L", backend="b", build_seconds=0, details={})
    note(records, {key.digest: 2, KIND_A: 1}, now_s=10)
    (listing,) = records.list()
    assert listing.record.name == "x"
    assert listing.missing == (KIND_A,)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"schema": 2}', "\0", "[" * 50_000])
def test_a_damaged_record_is_reported_and_started_again(
    records: CheckpointRecords, text: str
) -> None:
    note(records, {KIND_A: 1}, now_s=10)
    (records.folder.checkpoints / f"{MODEL}.json").write_text(text)
    with pytest.raises(StoreError) as caught:
        records.read(MODEL)
    assert caught.value.hint
    assert records.list() == []
    assert set(note(records, {KIND_B: 1}, now_s=20).kinds) == {KIND_B}


def test_a_record_under_another_name_is_refused(records: CheckpointRecords) -> None:
    note(records, {KIND_A: 1}, now_s=10)
    path = records.folder.checkpoints / f"{MODEL}.json"
    path.rename(path.with_name(f"{'b' * 64}.json"))
    with pytest.raises(StoreError, match="another checkpoint"):
        records.read("b" * 64)


def test_names_must_be_digests(records: CheckpointRecords) -> None:
    for name in ("", "../../x", MODEL[:-1], MODEL.upper()):
        with pytest.raises(OptionError):
            records.read(name)
    with pytest.raises(OptionError):
        note(records, {"../x": 1}, now_s=1)


# Content hashes


def settle(path: Path, seconds: float = 1_000_000) -> Path:
    """Give a file an old time stamp, so that its hash may be cached."""
    os.utime(path, (seconds, seconds))
    return path


@pytest.fixture
def read_count(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []
    original = content_hash_module._sha256

    def counting(path: Path) -> str:
        read.append(path)
        return original(path)

    monkeypatch.setattr(content_hash_module, "_sha256", counting)
    return read


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return settle(path)


def test_a_file_is_read_once(folder: StoreFolder, tmp_path: Path, read_count: list[Path]) -> None:
    path = write(tmp_path / "m.safetensors", b"weights")
    expected = hashlib.sha256(b"weights").hexdigest()
    assert ContentHashes(folder).content_hash(path) == expected
    assert ContentHashes(folder).content_hash(path) == expected
    assert len(read_count) == 1
    settle(path, 2_000_000)
    assert ContentHashes(folder).content_hash(path) == expected
    write(path, b"other weights")
    assert ContentHashes(folder).content_hash(path) != expected
    assert len(read_count) == 3


def test_a_file_changed_just_now_is_not_cached(
    folder: StoreFolder, tmp_path: Path, read_count: list[Path]
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"just now")
    ContentHashes(folder).content_hash(path)
    ContentHashes(folder).content_hash(path)
    assert len(read_count) == 2
    assert not folder.root.exists()


def test_a_file_that_changes_while_it_is_read_is_not_cached(
    folder: StoreFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.safetensors", b"before")
    original = content_hash_module._sha256

    def changing(read: Path) -> str:
        file_hash = original(read)
        path.write_bytes(b"after!")
        settle(path, 2_000_000)
        return file_hash

    with monkeypatch.context() as patch:
        patch.setattr(content_hash_module, "_sha256", changing)
        ContentHashes(folder).content_hash(path)
    assert ContentHashes(folder).content_hash(path) == hashlib.sha256(b"after!").hexdigest()


def test_a_folder_is_its_weights_and_configs(folder: StoreFolder, tmp_path: Path) -> None:
    hashes = ContentHashes(folder)
    model = tmp_path / "model"
    write(model / "unet" / "w.safetensors", b"w")
    write(model / "model_index.json", b"{}")
    first = hashes.content_hash(model)
    files = {"model_index.json": b"{}", "unet/w.safetensors": b"w"}
    text = "".join(f"{n}\0{hashlib.sha256(c).hexdigest()}\n" for n, c in sorted(files.items()))
    assert first == hashlib.sha256(text.encode()).hexdigest()
    write(model / "README.md", b"not part of it")
    assert hashes.content_hash(model) == first
    (model / "unet" / "w.safetensors").rename(model / "unet" / "v.safetensors")
    assert hashes.content_hash(model) != first


def test_the_index_of_a_folder_stands_for_the_folder(folder: StoreFolder, tmp_path: Path) -> None:
    """Two folders of one architecture have equal indices."""
    hashes = ContentHashes(folder)
    found = []
    for name in ("one", "other"):
        write(tmp_path / name / "unet" / "w.safetensors", name.encode())
        index = write(tmp_path / name / "model_index.json", b"{}")
        found.append(hashes.content_hash(index))
        assert found[-1] == hashes.content_hash(tmp_path / name)
    assert found[0] != found[1]


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps the time of creation there")
def test_a_file_copied_over_another_with_its_mtime_is_read_again(
    folder: StoreFolder, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.safetensors", b"one")
    assert ContentHashes(folder).content_hash(path) == hashlib.sha256(b"one").hexdigest()
    time.sleep(0.05)  # more than a tick of the file system's clock
    write(path, b"two")  # of the same size, and `settle` gives it the same mtime
    assert ContentHashes(folder).content_hash(path) == hashlib.sha256(b"two").hexdigest()


def test_links_share_the_entry_of_their_file(
    folder: StoreFolder, tmp_path: Path, read_count: list[Path]
) -> None:
    blob = write(tmp_path / "blobs" / "1", b"w")
    link = tmp_path / "snapshot.safetensors"
    try:
        link.symlink_to(blob)
    except OSError as exc:
        pytest.skip(f"no symbolic links here: {exc}")
    assert ContentHashes(folder).content_hash(link) == ContentHashes(folder).content_hash(blob)
    assert len(read_count) == 1


def test_the_cache_is_bounded_and_the_oldest_go(
    folder: StoreFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_hash_module, "MAX_CACHED", 2)
    for i in range(4):
        ContentHashes(folder).content_hash(write(tmp_path / f"{i}.safetensors", b"w"))
    cached = json.loads((folder.home / "content-hashes.json").read_text())["files"]
    assert {Path(name).name for name in cached} == {"2.safetensors", "3.safetensors"}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 9, "files": {}}', '{"schema": 1, "files": {"P": {"sha256": 5}}}']
)
def test_a_damaged_cache_costs_time_only(folder: StoreFolder, tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "m.safetensors", b"w")
    folder.prepare()
    (folder.home / "content-hashes.json").write_text(text.replace("P", str(path.resolve())))
    assert ContentHashes(folder).content_hash(path) == hashlib.sha256(b"w").hexdigest()


def test_what_cannot_be_hashed_is_a_checkpoint_error(folder: StoreFolder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no file"):
        ContentHashes(folder).content_hash(tmp_path / "absent.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no"):
        ContentHashes(folder).content_hash(tmp_path / "empty")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no paths of that length")
def test_a_folder_that_is_nested_deeper_than_calls(folder: StoreFolder, tmp_path: Path) -> None:
    made = [tmp_path / "model"]
    made[0].mkdir()
    try:
        for _ in range(1100):
            made.append(made[-1] / "d")
            made[-1].mkdir()
        with pytest.raises(CheckpointError, match=r"nested too deeply|holds no \.safetensors"):
            ContentHashes(folder).content_hash(made[0])
    finally:
        for path in reversed(made):
            path.rmdir()

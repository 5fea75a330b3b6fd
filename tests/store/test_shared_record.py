"""Small files that processes share: changed under a lock, and started again where damaged."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from onediff_ext.core.records import items
from onediff_ext.store import GraphLibrary
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.shared_record import SharedRecord

NAME = "numbers.json"


def parse(fields: Mapping[str, object]) -> list[object]:
    return list(items(fields.get("numbers", [])))


def record_of(folder: StoreFolder, schema: int = 3, lock_timeout_s: float = 10.0):
    return SharedRecord(
        folder, NAME, schema, parse, lambda numbers: {"numbers": numbers}, lock_timeout_s
    )


@pytest.fixture
def folder(tmp_path: Path) -> StoreFolder:
    return GraphLibrary(tmp_path / "store", 10**9).folder


def test_changes_of_many_threads_are_all_kept(folder: StoreFolder) -> None:
    def change(number: int) -> None:
        record_of(folder).change(lambda numbers: numbers.append(number))

    threads = [threading.Thread(target=change, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record_of(folder).read()) == list(range(12))


@pytest.mark.parametrize("content", [b"", b"damaged", b"[]", b"{}", b'{"schema": 3, "numbers": 1}'])
def test_a_file_that_cannot_be_read_starts_again(folder: StoreFolder, content: bytes) -> None:
    record = record_of(folder)
    record.change(lambda numbers: numbers.append(1))
    (folder.home / NAME).write_bytes(content)
    assert record.read() == []
    record.change(lambda numbers: numbers.append(2))
    assert record.read() == [2]


def test_a_file_of_another_schema_starts_again(folder: StoreFolder) -> None:
    record_of(folder, schema=2).change(lambda numbers: numbers.append(1))
    assert record_of(folder).read() == []
    record_of(folder).change(lambda numbers: numbers.append(2))
    assert json.loads((folder.home / NAME).read_text()) == {"schema": 3, "numbers": [2]}


def test_a_change_that_gets_no_lock_is_left_out(folder: StoreFolder) -> None:
    record = record_of(folder, lock_timeout_s=0.05)
    record.change(lambda numbers: numbers.append(1))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with folder.locks.hold("numbers", 1.0):
            held.set()
            done.wait(10.0)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10.0)
    record.change(lambda numbers: numbers.append(2))
    done.set()
    thread.join()
    assert record.read() == [1]


def test_an_error_of_the_change_leaves_the_file_as_it_was(folder: StoreFolder) -> None:
    record = record_of(folder)
    record.change(lambda numbers: numbers.append(1))

    def fail(numbers: list[object]) -> None:
        numbers.append(2)
        raise KeyError("fox")

    with pytest.raises(KeyError):
        record.change(fail)
    assert record.read() == [1]

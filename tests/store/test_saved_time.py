"""The saved time: added up by machine and checkpoint, and never a reason to fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onediff_ext.store import GraphLibrary, SavedTimes
from onediff_ext.store.saved_time import SAVED_TIME_FILE

ONE, TWO = "a" * 64, "b" * 64


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    return GraphLibrary(tmp_path / "store", 10**9)


def test_pictures_add_up_by_machine_and_checkpoint(library: GraphLibrary) -> None:
    times = SavedTimes(library.folder)
    assert times.of("here", ONE) is None
    for seconds in (2.5, -0.5, 1.25):
        times.add("here", ONE, seconds)
    times.add("here", TWO, 7.0)
    times.add("there", ONE, 9.0)
    again = SavedTimes(GraphLibrary(library.folder.root, 10**9).folder)
    saved = again.of("here", ONE)
    assert saved is not None
    assert (saved.seconds, saved.pictures) == (3.25, 3)
    assert saved.since > 1.7e9
    assert [again.of(m, c).seconds for m, c in (("here", TWO), ("there", ONE))] == [7.0, 9.0]


@pytest.mark.parametrize(
    "content",
    [
        b"damaged",
        b"[]",
        b'{"schema": 2, "machines": {}}',
        b'{"schema": 1, "machines": {"here": {"c": {"seconds": "much"}}}}',
        b'{"schema": 1, "machines": {"here": {"c": {"seconds": 1e999}}}}',
    ],
)
def test_a_file_that_cannot_be_read_starts_again(library: GraphLibrary, content: bytes) -> None:
    times = SavedTimes(library.folder)
    times.add("here", ONE, 1.0)
    path = library.folder.home / SAVED_TIME_FILE
    path.write_bytes(content)
    assert times.of("here", ONE) is None
    times.add("here", ONE, 2.0)
    assert times.of("here", ONE).seconds == 2.0


def test_verifying_deletes_a_damaged_file(library: GraphLibrary) -> None:
    SavedTimes(library.folder).add("here", ONE, 1.0)
    path = library.folder.home / SAVED_TIME_FILE
    assert library.verify(repair=True) == []
    path.write_bytes(b"damaged")
    (problem,) = library.verify(repair=True)
    assert problem.path == path
    assert not path.exists()


def test_a_store_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    times = SavedTimes(GraphLibrary(tmp_path / "store", 10**9).folder)
    times.add("here", ONE, 1.0)
    assert times.of("here", ONE) is None


def test_the_file_names_its_schema(library: GraphLibrary) -> None:
    SavedTimes(library.folder).add("here", ONE, 1.0)
    record = json.loads((library.folder.home / SAVED_TIME_FILE).read_text())
    assert record["schema"] == 1
    assert set(record["machines"]["here"][ONE]) == {"seconds", "pictures", "since"}

"""The kinds that pipelines used last: a hint, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_ext.store import COUNTED_PICTURES, GraphLibrary, LastKinds, LastUse
from onediff_ext.store.last_kinds import _KEPT, LAST_KINDS_FILE

ONE, TWO = "a" * 64, "b" * 64


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    return GraphLibrary(tmp_path / "store", 10**9)


def use(*kinds: str, saved_s: float = 0.0, load_s: float = 0.0, pictures: int = 0) -> LastUse:
    return LastUse(kinds, saved_s, load_s, pictures)


def test_the_last_use_of_a_form_replaces_earlier_ones(library: GraphLibrary) -> None:
    kinds = LastKinds(library.folder)
    assert kinds.of("form") == use()
    kinds.record("form", use(ONE))
    kinds.record("other", use(ONE))
    kinds.record("form", use(TWO, ONE, saved_s=0.5, load_s=2.5, pictures=3))
    again = LastKinds(GraphLibrary(library.folder.root, 10**9).folder)
    assert again.of("form") == use(TWO, ONE, saved_s=0.5, load_s=2.5, pictures=3)
    assert again.of("other") == use(ONE)


def test_the_forms_that_were_used_last_are_kept(library: GraphLibrary) -> None:
    kinds = LastKinds(library.folder)
    for number in range(_KEPT):
        kinds.record(str(number), use(ONE))
    kinds.record("0", use(TWO))
    kinds.record("new", use(ONE))
    assert kinds.of("0") == use(TWO)
    assert kinds.of("new") == use(ONE)
    assert kinds.of("1") == use()


@pytest.mark.parametrize(
    "content",
    [b"damaged", b"[]", b'{"schema": 1, "forms": {}}', b'{"schema": 2, "forms": {"form": []}}'],
)
def test_a_file_that_cannot_be_read_starts_again(library: GraphLibrary, content: bytes) -> None:
    kinds = LastKinds(library.folder)
    kinds.record("form", use(ONE))
    path = library.folder.home / LAST_KINDS_FILE
    path.write_bytes(content)
    assert kinds.of("form") == use()
    kinds.record("form", use(TWO))
    assert kinds.of("form") == use(TWO)


def test_only_digests_are_believed(library: GraphLibrary) -> None:
    kinds = LastKinds(library.folder)
    kinds.record("form", use(ONE, "../../etc/passwd", TWO))
    assert kinds.of("form") == use(ONE, TWO)


def test_no_more_pictures_count_than_anybody_writes(library: GraphLibrary) -> None:
    kinds = LastKinds(library.folder)
    kinds.record("form", use(ONE, pictures=10**9))
    assert kinds.of("form") == use(ONE, pictures=COUNTED_PICTURES)


@pytest.mark.parametrize("seconds", ["-1", "NaN", "Infinity", '"3"', "null"])
def test_seconds_that_make_no_sense_are_not_known(library: GraphLibrary, seconds: str) -> None:
    kinds = LastKinds(library.folder)
    kinds.record("form", use(ONE, saved_s=12.5))
    path = library.folder.home / LAST_KINDS_FILE
    path.write_text(path.read_text().replace("12.5", seconds))
    assert kinds.of("form") == use(ONE)


def test_verifying_deletes_a_damaged_file(library: GraphLibrary) -> None:
    LastKinds(library.folder).record("form", use(ONE))
    path = library.folder.home / LAST_KINDS_FILE
    assert library.verify(repair=True) == []
    path.write_bytes(b"damaged")
    assert [problem.path.name for problem in library.verify(repair=True)] == [LAST_KINDS_FILE]
    assert not path.exists()

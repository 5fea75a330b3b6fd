"""The kinds that pipelines used last: a hint, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_ext.store import GraphLibrary, LastKinds
from onediff_ext.store.last_kinds import _KEPT, LAST_KINDS_FILE

ONE, TWO = "a" * 64, "b" * 64


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    return GraphLibrary(tmp_path / "store", 10**9)


def test_the_last_kinds_of_a_form_replace_earlier_ones(library: GraphLibrary) -> None:
    kinds = LastKinds(library.folder)
    assert kinds.of("form") == []
    kinds.record("form", [ONE])
    kinds.record("other", [ONE])
    kinds.record("form", [TWO, ONE])
    again = LastKinds(GraphLibrary(library.folder.root, 10**9).folder)
    assert again.of("form") == [TWO, ONE]
    assert again.of("other") == [ONE]


def test_the_forms_that_were_used_last_are_kept(library: GraphLibrary) -> None:
    kinds = LastKinds(library.folder)
    for number in range(_KEPT):
        kinds.record(str(number), [ONE])
    kinds.record("0", [TWO])
    kinds.record("new", [ONE])
    assert kinds.of("0") == [TWO]
    assert kinds.of("new") == [ONE]
    assert kinds.of("1") == []


@pytest.mark.parametrize(
    "content",
    [b"damaged", b"[]", b'{"schema": 2, "forms": {}}', b'{"schema": 1, "forms": {"form": 3}}'],
)
def test_a_file_that_cannot_be_read_starts_again(library: GraphLibrary, content: bytes) -> None:
    kinds = LastKinds(library.folder)
    kinds.record("form", [ONE])
    path = library.folder.home / LAST_KINDS_FILE
    path.write_bytes(content)
    assert kinds.of("form") == []
    kinds.record("form", [TWO])
    assert kinds.of("form") == [TWO]


def test_only_digests_are_believed(library: GraphLibrary) -> None:
    kinds = LastKinds(library.folder)
    kinds.record("form", [ONE, "../../etc/passwd", TWO])
    assert kinds.of("form") == [ONE, TWO]


def test_verifying_deletes_a_damaged_file(library: GraphLibrary) -> None:
    LastKinds(library.folder).record("form", [ONE])
    path = library.folder.home / LAST_KINDS_FILE
    assert library.verify(repair=True) == []
    path.write_bytes(b"damaged")
    assert [problem.path.name for problem in library.verify(repair=True)] == [LAST_KINDS_FILE]
    assert not path.exists()

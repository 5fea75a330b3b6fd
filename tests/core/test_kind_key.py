"""A kind's key: equal entries share a graph, and a miss can be explained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onediff_ext.core.kind_key import KindKey

ENTRIES = st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=6)


@given(ENTRIES)
def test_order_of_entries_does_not_matter(entries: dict[str, str]) -> None:
    backwards = KindKey(dict(reversed(entries.items())))
    assert backwards == KindKey(entries)
    assert hash(backwards) == hash(KindKey(entries))
    assert backwards.differences(KindKey(entries)) == []


@given(ENTRIES, ENTRIES)
def test_keys_are_equal_exactly_when_entries_are(
    first: dict[str, str], second: dict[str, str]
) -> None:
    assert (KindKey(first) == KindKey(second)) == (first == second)


@given(ENTRIES, st.text(max_size=12), st.text(max_size=12))
def test_any_changed_or_added_entry_changes_the_digest(
    entries: dict[str, str], name: str, value: str
) -> None:
    changed = {**entries, name: value + "x"}
    if changed != entries:
        assert KindKey(changed).digest != KindKey(entries).digest


@given(ENTRIES, ENTRIES)
def test_one_difference_for_each_entry_that_differs(
    needed: dict[str, str], stored: dict[str, str]
) -> None:
    absent = object()
    differing = {n for n in {*needed, *stored} if needed.get(n, absent) != stored.get(n, absent)}
    lines = KindKey(needed).differences(KindKey(stored))
    # A value "absent" reads like a missing entry; the digests still differ.
    if "absent" not in {*needed.values(), *stored.values()}:
        assert len(lines) == len(differing)


@pytest.mark.parametrize(
    ("needed", "stored", "line"),
    [
        ({"torch": "2.14.0"}, {"torch": "2.13.0"}, "torch 2.13.0 → 2.14.0"),
        ({"torch": "2.14.0"}, {}, "torch absent → 2.14.0"),
        ({}, {"torch": "2.13.0"}, "torch 2.13.0 → absent"),
    ],
)
def test_a_difference_goes_from_stored_to_needed(
    needed: dict[str, str], stored: dict[str, str], line: str
) -> None:
    assert KindKey(needed).differences(KindKey(stored)) == [line]


def test_a_digest_is_a_file_name() -> None:
    digest = KindKey({"class": "../é\n"}).digest
    assert len(digest) == 64
    assert set(digest) <= set("0123456789abcdef")


def test_a_key_is_not_equal_to_its_entries() -> None:
    assert KindKey({"a": "b"}) != {"a": "b"}

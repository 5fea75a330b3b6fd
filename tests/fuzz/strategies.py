"""Inputs: valid ones with mistakes, since most readers refuse noise at its first byte."""

from __future__ import annotations

import copy
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

MOST_CHARS = 100_000

# Lone surrogates, controls and whatever else a name or a JSON text may hold.
CHARACTERS = st.characters(codec=None, exclude_categories=())
ODD = st.sampled_from(
    ["", " ", "\0", "\x1b[2J", "\ud800", "\udcff", "../", "x" * 300, "9" * 5000, "nan", "1e999",
     "-1"]
)  # fmt: skip
TEXTS = st.one_of(st.text(CHARACTERS, max_size=60), ODD)
NUMBERS = st.one_of(
    st.integers(-5, 300),
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)


def near(examples: Sequence[Any]) -> SearchStrategy[Any]:
    """Plain values like one of the examples, with up to three parts changed, added or gone."""
    changes = st.lists(
        st.tuples(st.integers(0, 10**6), JSON, st.sampled_from(["set", "drop", "add"])), max_size=3
    )
    return st.builds(_changed, st.sampled_from(list(examples)), changes)


def _changed(example: Any, changes: Sequence[tuple[int, Any, str]]) -> Any:
    value = copy.deepcopy(example)
    for number, other, how in changes:
        places = list(_places(value))
        if not places:
            return other
        holder, key = places[number % len(places)]
        if how == "set":
            holder[key] = other
        elif how == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[f"{key}{number % 10}"] = other
        else:
            holder.append(other)
    return value


def _places(value: Any) -> Any:
    entries: Any = ()
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    for key, inner in entries:
        yield value, key
        yield from _places(inner)


def damaged(wholes: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Bytes like one of the wholes: flipped, overwritten, cut, put in, doubled."""
    edits = st.lists(
        st.tuples(
            st.integers(0, 2**31), st.sampled_from(["set", "insert", "cut", "drop", "double"]),
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(_WORDS)),
        ),
        max_size=4,
    )  # fmt: skip
    return st.builds(_edited, st.sampled_from(list(wholes)), edits)


_WORDS = [
    bytes(4), b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\x01\0\0\0",
    b"\0\0\0\x01",
]  # fmt: skip


def _edited(whole: bytes, edits: Sequence[tuple[int, str, bytes]]) -> bytes:
    content = bytearray(whole)
    for number, how, word in edits:
        at = number % (len(content) + 1)
        if how == "set":
            content[at : at + len(word)] = word
        elif how == "insert":
            content[at:at] = word
        elif how == "cut":
            del content[at:]
        elif how == "drop":
            del content[at : at + len(word)]
        else:
            content[at:at] = content[at : at + 64 * len(word)]
    return bytes(content)


def joined(alphabet: Sequence[str], most: int = 40) -> SearchStrategy[str]:
    """Texts of words that mean something to the reader, some of them many times over."""
    words = st.one_of(st.sampled_from(list(alphabet)), TEXTS)
    run = st.builds(
        lambda word, count: word * count, words, st.sampled_from([1, 1, 1, 2, 50, 5000])
    )
    return st.lists(run, max_size=most).map(lambda words: "".join(words)[:MOST_CHARS])


def png_chunk(kind: bytes, body: bytes, *, good: bool = True) -> bytes:
    """One chunk of a PNG file, with its checksum or a wrong one."""
    checksum = zlib.crc32(kind + body) ^ (not good)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def safetensors(header: Mapping[str, Any] | str, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    import json

    text = header if isinstance(header, str) else json.dumps(header)
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded + data

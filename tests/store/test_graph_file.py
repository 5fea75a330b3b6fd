"""The bytes of a graph file: what goes in comes out, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onediff_ext.core.errors import GraphCorruptError, OneDiffError, StoreError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.records import CheckpointRecord, GraphHeader, KindUse
from onediff_ext.store.graph_file import (
    GRAPH_SCHEMA,
    MAGIC,
    MAX_HEADER_BYTES,
    UnknownSchemaError,
    encode_head,
    peek_schema,
    read_head,
    read_payload,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
SECONDS = st.floats(0, 1e12)


def header_of(payload: bytes, **changes: object) -> GraphHeader:
    header = GraphHeader(
        key=KindKey({"class": "ResnetBlock2D", "torch": "2.13.0"}),
        label="ResnetBlock2D 320→640",
        backend="inductor",
        payload_sha256=hashlib.sha256(payload).hexdigest(),
        payload_size_bytes=len(payload),
        created_at=1.5e9,
        build_seconds=2.5,
    )
    return replace(header, **changes)  # type: ignore[arg-type]


def encode(header: GraphHeader, payload: bytes) -> bytes:
    return encode_head(header)[0] + payload


def decode(graph_file: bytes) -> tuple[GraphHeader, bytes]:
    stream = BytesIO(graph_file)
    header = read_head(stream, len(graph_file))
    return header, read_payload(stream, header)


@given(
    entries=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=5),
    label=st.text(max_size=20),
    payload=st.binary(max_size=300),
    created_at=SECONDS,
    build_seconds=SECONDS,
    details=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
)
def test_what_goes_in_comes_out(
    entries: dict[str, str],
    label: str,
    payload: bytes,
    created_at: float,
    build_seconds: float,
    details: dict[str, object],
) -> None:
    header = header_of(
        payload,
        key=KindKey(entries),
        label=label,
        created_at=created_at,
        build_seconds=build_seconds,
        details=details,
    )
    assert decode(encode(header, payload)) == (header, payload)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(garbage: bytes) -> None:
    for graph_file in (garbage, MAGIC + garbage, MAGIC + struct.pack("<I", GRAPH_SCHEMA) + garbage):
        with pytest.raises((GraphCorruptError, UnknownSchemaError)):
            decode(graph_file)


@given(st.data())
def test_any_flipped_byte_is_noticed(draw: st.DataObject) -> None:
    graph_file = bytearray(encode(header_of(b"payload"), b"payload"))
    position = draw.draw(st.integers(0, len(graph_file) - 1))
    graph_file[position] ^= draw.draw(st.integers(1, 255))
    with pytest.raises((GraphCorruptError, UnknownSchemaError)):
        decode(bytes(graph_file))


def test_every_truncation_and_extension_is_noticed() -> None:
    graph_file = encode(header_of(b"payload"), b"payload")
    for length in range(len(graph_file)):
        with pytest.raises(GraphCorruptError):
            decode(graph_file[:length])
    with pytest.raises(GraphCorruptError, match="bytes, not"):
        decode(graph_file + b"\0")


def test_another_schema_is_told_apart_from_damage() -> None:
    graph_file = MAGIC + struct.pack("<I", 7) + b"whatever schema 7 is like"
    with pytest.raises(UnknownSchemaError, match="schema 7"):
        decode(graph_file)
    assert peek_schema(graph_file) == 7
    assert peek_schema(graph_file[:11]) is None
    assert peek_schema(b"PK\3\4" + graph_file) is None


@pytest.mark.parametrize(
    "record",
    [
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"schema":1,"key":{"a":1}}',
        b'{"schema":1,"created_at":NaN}',
    ],
    ids=["list", "empty", "deep", "number in key", "nan"],
)
def test_a_wrong_header_with_a_right_hash_is_damage(record: bytes) -> None:
    prefix = struct.pack(
        "<8sII32s", MAGIC, GRAPH_SCHEMA, len(record), hashlib.sha256(record).digest()
    )
    with pytest.raises(GraphCorruptError):
        decode(prefix + record)


def test_a_huge_header_length_is_refused_before_reading() -> None:
    prefix = struct.pack("<8sII32s", MAGIC, GRAPH_SCHEMA, 0xFFFFFFFF, b"\0" * 32)
    with pytest.raises(GraphCorruptError, match="cut short"):
        read_head(BytesIO(prefix), 1 << 40)


@pytest.mark.parametrize(
    "changes",
    [
        {"details": {"bytes": b""}},
        {"details": {"nan": float("nan")}},
        {"details": {"large": "x" * MAX_HEADER_BYTES}},
        {"key": KindKey({"torch": 2})},  # type: ignore[dict-item]
        {"origin": "found"},
        {"build_seconds": float("inf")},
    ],
    ids=["bytes", "nan", "large", "key", "origin", "seconds"],
)
def test_what_could_not_be_read_back_is_not_written(changes: dict[str, object]) -> None:
    with pytest.raises(StoreError):
        encode_head(header_of(b"", **changes))


@given(JSON)
def test_records_read_any_json_or_say_why_not(record: object) -> None:
    for read in (GraphHeader.from_json, CheckpointRecord.from_json):
        with pytest.raises(OneDiffError):
            read(record)


def test_a_number_beyond_floats_is_refused() -> None:
    record = {**header_of(b"").to_json(), "created_at": 10**400}
    with pytest.raises(StoreError, match="finite"):
        GraphHeader.from_json(record)


@given(st.text(), st.dictionaries(st.text(), st.builds(KindUse, st.integers(0, 99), SECONDS)))
def test_checkpoint_records_round_trip(name: str, kinds: dict[str, KindUse]) -> None:
    record = CheckpointRecord("0" * 64, name, "/p", "SDXL", kinds)
    assert CheckpointRecord.from_json(record.to_json()) == record

"""Bytes and digests that must not change by accident: users have them on disk.

A change here means a new schema number. To write the golden file for a new schema:
`ONEDIFF_WRITE_GOLDEN=1 pytest tests/golden/test_store_golden.py`.
"""

from __future__ import annotations

import hashlib
import os
from io import BytesIO
from pathlib import Path

from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.records import GraphHeader
from onediff_ext.store.graph_file import GRAPH_SCHEMA, encode_head, read_head, read_payload

GOLDEN = Path(__file__).with_name(f"schema-{GRAPH_SCHEMA}.graph")
PAYLOAD = b"\x7fELF\0golden payload\r\n"
KEY = KindKey({"class": "ResnetBlock2D", "channels": "320→640", "torch": "2.13.0"})
HEADER = GraphHeader(
    key=KEY,
    label="ResnetBlock2D 320→640",
    backend="inductor",
    payload_sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    payload_size_bytes=len(PAYLOAD),
    created_at=1760000000.25,
    build_seconds=2.5,
    origin="built",
    details={"outputs": 1, "entry": "call"},
)


def test_a_graph_is_written_as_it_always_was() -> None:
    graph_file = encode_head(HEADER)[0] + PAYLOAD
    if os.environ.get("ONEDIFF_WRITE_GOLDEN"):
        GOLDEN.write_bytes(graph_file)
    assert graph_file == GOLDEN.read_bytes()


def test_a_graph_from_back_then_is_read() -> None:
    graph_file = GOLDEN.read_bytes()
    stream = BytesIO(graph_file)
    header = read_head(stream, len(graph_file))
    assert header == HEADER
    assert read_payload(stream, header) == PAYLOAD


def test_the_prefix_is_where_every_version_looks_for_it() -> None:
    assert GOLDEN.read_bytes()[:12].hex(" ") == "89 4f 44 47 0d 0a 1a 0a 01 00 00 00"


def test_the_digest_of_a_key() -> None:
    assert KEY.digest == "a57a4dd7fcc38457ead623c855fac9fe7f9deece96bde03db54869ee78959200"
    assert KindKey({}).digest == hashlib.sha256(b"{}").hexdigest()

"""Bytes and digests that must not change by accident: users have them on disk.

A change here means a new schema number. To write the golden file for a new schema:
`ONEDIFF_WRITE_GOLDEN=1 pytest tests/golden/test_store_golden.py`.
"""

from __future__ import annotations

import hashlib
import os
from io import BytesIO
from pathlib import Path

import pytest

from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.records import GraphHeader
from onediff_ext.store import BuildRecords, Failure, LoadCheck
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.graph_file import GRAPH_SCHEMA, encode_head, read_head, read_payload

GOLDEN = Path(__file__).with_name(f"schema-{GRAPH_SCHEMA}.graph")
GOLDEN_RECORD = Path(__file__).with_name("build-record-2.json")
DIGEST = "ab" * 32
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


def test_a_build_record_is_written_as_it_always_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onediff_ext.store.build_records.time.time", lambda: 1760000000.25)
    records, label = BuildRecords(StoreFolder(tmp_path / "store")), "ResnetBlock2D 320→640"
    records.record_load_check(DIGEST, label, machine="m1", payload_sha256="0" * 64)
    records.record_load_check(
        DIGEST, label, machine="m2", payload_sha256="1" * 64, problem="differs from eager"
    )
    records.record_failure(DIGEST, label, "no such operator", attempts=2, version="0.1.0")
    records.record_eviction(DIGEST, "least recently used")
    path = records.folder.build_records / f"{DIGEST}.json"
    assert path.read_bytes() == GOLDEN_RECORD.read_bytes()


def test_a_build_record_from_back_then_is_read(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path / "store")
    folder.prepare()
    (folder.home / "verdicts" / f"{DIGEST}.json").write_bytes(GOLDEN_RECORD.read_bytes())
    record = BuildRecords(folder).read(DIGEST)
    at = 1760000000.25
    assert record.load_checks == {
        "m1": LoadCheck("0" * 64, "", at),
        "m2": LoadCheck("1" * 64, "differs from eager", at),
    }
    assert record.failure == Failure("no such operator", 2, at, "0.1.0")
    assert record.eviction is not None
    assert record.eviction.reason == "least recently used"


def test_the_prefix_is_where_every_version_looks_for_it() -> None:
    assert GOLDEN.read_bytes()[:12].hex(" ") == "89 4f 44 47 0d 0a 1a 0a 01 00 00 00"


def test_the_digest_of_a_key() -> None:
    assert KEY.digest == "a57a4dd7fcc38457ead623c855fac9fe7f9deece96bde03db54869ee78959200"
    assert KindKey({}).digest == hashlib.sha256(b"{}").hexdigest()

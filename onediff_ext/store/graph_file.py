"""The layout of a graph file.

    offset  size
    0       8     magic, 89 'O' 'D' 'G' CR LF 1A LF
    8       4     schema number, unsigned, little endian
    12      4     length H of the header in bytes, unsigned, little endian
    16      32    SHA-256 of the header
    48      H     header, JSON in ASCII
    48+H    ...   payload; the header has its length and SHA-256

Magic and schema number keep their places in every future schema. One file holds everything of a
graph, so one rename publishes it.

Source: the magic follows PNG's (RFC 2083, 12.12), which reveals damage by text-mode copying.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import BinaryIO

from onediff_ext.core.errors import GraphCorruptError, StoreError
from onediff_ext.core.records import GraphHeader

MAGIC = b"\x89ODG\r\n\x1a\n"
GRAPH_SCHEMA = 1
MAX_HEADER_BYTES = 4 << 20
_PREFIX = struct.Struct("<8sII32s")
_SCHEMA = struct.Struct("<8sI")
_HINT = "It is built again by itself; `onediff-ext graphs verify` looks at the others."


class UnknownSchemaError(StoreError):
    """Another version of this product wrote the graph file."""


def encode_head(header: GraphHeader) -> tuple[bytes, GraphHeader]:
    """Encode everything before the payload.

    Args:
        header: What the file says of its payload: key, digests, sizes.

    Returns:
        The bytes, and the header as it will be read back (tuples become lists).

    Raises:
        StoreError: The header cannot be JSON, or is too long.
    """
    record = {"schema": GRAPH_SCHEMA, **header.to_json()}
    try:
        text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise StoreError(f"The header of graph {header.label!r} is not JSON: {exc}.") from exc
    encoded = text.encode("ascii")
    if len(encoded) > MAX_HEADER_BYTES:
        raise StoreError(
            f"The header of graph {header.label!r} has {len(encoded)} bytes, "
            f"over {MAX_HEADER_BYTES}.",
            "Put what is large into the payload, not into the details.",
        )
    try:
        read_back = GraphHeader.from_json(json.loads(encoded))
    except StoreError as exc:
        raise StoreError(f"The header of graph {header.label!r} is wrong: {exc}") from exc
    checksum = hashlib.sha256(encoded).digest()
    return _PREFIX.pack(MAGIC, GRAPH_SCHEMA, len(encoded), checksum) + encoded, read_back


def read_head(file: BinaryIO, size_bytes: int) -> GraphHeader:
    """Read everything before the payload.

    Args:
        file: At its first byte; left at the payload's first byte.
        size_bytes: Length of the whole file.

    Returns:
        The header.

    Raises:
        GraphCorruptError: Something differs from what was saved.
        UnknownSchemaError: Another version wrote the file.
    """
    prefix = file.read(_PREFIX.size)
    schema = peek_schema(prefix)
    if schema is None:
        raise GraphCorruptError("the file does not start like a graph", _HINT)
    if schema != GRAPH_SCHEMA:
        if _is_ours(file, prefix):
            raise GraphCorruptError("the schema number is damaged", _HINT)
        raise UnknownSchemaError(
            f"written by another version (schema {schema}; this one reads {GRAPH_SCHEMA})",
            "Use the version that wrote it; this one builds its own.",
        )
    if len(prefix) < _PREFIX.size:
        raise GraphCorruptError("the file is cut short", _HINT)
    _, _, length, checksum = _PREFIX.unpack(prefix)
    if length > min(MAX_HEADER_BYTES, size_bytes - _PREFIX.size):
        raise GraphCorruptError("the header is cut short", _HINT)
    encoded = file.read(length)
    if hashlib.sha256(encoded).digest() != checksum:
        raise GraphCorruptError("the header's hash differs", _HINT)
    header = _parse(encoded)
    expected = _PREFIX.size + length + header.payload_size_bytes
    if size_bytes != expected:
        raise GraphCorruptError(f"the file has {size_bytes} bytes, not {expected}", _HINT)
    return header


def read_payload(file: BinaryIO, header: GraphHeader) -> bytes:
    """Read the payload after `read_head`.

    Args:
        file: At the payload's first byte.
        header: From `read_head`.

    Returns:
        The checked bytes.

    Raises:
        GraphCorruptError: It differs from the saved payload.
    """
    payload = file.read(header.payload_size_bytes)
    if hashlib.sha256(payload).hexdigest() != header.payload_sha256:
        raise GraphCorruptError("the payload's hash differs", _HINT)
    return payload


def peek_schema(prefix: bytes) -> int | None:
    """Return the schema number in a graph file's first 12 bytes; None when it is not a graph.

    Args:
        prefix: The first 12 bytes or more; fewer are not a graph.
    """
    if len(prefix) < _SCHEMA.size:
        return None
    magic, schema = _SCHEMA.unpack_from(prefix)
    return int(schema) if magic == MAGIC else None


def _is_ours(file: BinaryIO, prefix: bytes) -> bool:
    """Whether a header of this schema follows, so that only the number in the prefix is wrong."""
    if len(prefix) < _PREFIX.size:
        return False
    _, _, length, checksum = _PREFIX.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        return False
    encoded = file.read(length)
    if hashlib.sha256(encoded).digest() != checksum:
        return False
    try:
        _parse(encoded)
    except GraphCorruptError:
        return False
    return True


def _parse(encoded: bytes) -> GraphHeader:
    try:
        record = json.loads(encoded)
        header = GraphHeader.from_json(record)
    except (ValueError, RecursionError, StoreError) as exc:
        raise GraphCorruptError(f"the header cannot be read: {exc}", _HINT) from exc
    if record.get("schema") != GRAPH_SCHEMA:
        raise GraphCorruptError("the header names another schema", _HINT)
    return header

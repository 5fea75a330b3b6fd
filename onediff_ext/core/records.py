"""Records of the store about graphs and checkpoints, as plain data.

Reading is strict: a missing field or a wrong type is an error, so a damaged record is noticed
here and not later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from onediff_ext.core.errors import StoreError
from onediff_ext.core.kind_key import KindKey

CHECKPOINT_SCHEMA = 1

ORIGIN_BUILT = "built"
ORIGIN_IMPORTED = "imported"


@dataclass(frozen=True)
class GraphHeader:
    """The header of a stored graph, which is read without the payload.

    Args:
        key: The kind that the graph serves.
        label: For people, e.g. ``"ResnetBlock2D 320→640"``.
        backend: Name of the backend that built the graph and can load it.
        payload_sha256: 64 hexadecimal digits.
        payload_size_bytes: Length of the payload.
        created_at: Seconds since the epoch.
        build_seconds: How long the build took.
        origin: ``"built"`` on this machine or ``"imported"`` from an archive.
        details: Small JSON object for the backend.
    """

    key: KindKey
    label: str
    backend: str
    payload_sha256: str
    payload_size_bytes: int
    created_at: float
    build_seconds: float
    origin: str = ORIGIN_BUILT
    details: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the header as a JSON object, without its schema number."""
        return {
            "key": dict(self.key.entries),
            "label": self.label,
            "backend": self.backend,
            "payload_sha256": self.payload_sha256,
            "payload_size_bytes": self.payload_size_bytes,
            "created_at": self.created_at,
            "build_seconds": self.build_seconds,
            "origin": self.origin,
            "details": dict(self.details),
        }

    @classmethod
    def from_json(cls, record: object) -> GraphHeader:
        """Read what `to_json` returned.

        Raises:
            StoreError: A field is missing or has the wrong type.
        """
        fields = mapping(record, "graph header")
        entries = mapping(fields.get("key"), "key")
        origin = text(fields, "origin")
        if origin not in (ORIGIN_BUILT, ORIGIN_IMPORTED):
            raise StoreError(f"Field 'origin' has the unknown value {origin!r}.")
        return cls(
            key=KindKey({name: text(entries, name) for name in entries}),
            label=text(fields, "label"),
            backend=text(fields, "backend"),
            payload_sha256=text(fields, "payload_sha256"),
            payload_size_bytes=count(fields, "payload_size_bytes"),
            created_at=number(fields, "created_at"),
            build_seconds=number(fields, "build_seconds"),
            origin=origin,
            details=mapping(fields.get("details"), "details"),
        )


@dataclass(frozen=True)
class KindUse:
    """How a checkpoint uses one kind.

    Args:
        block_count: Number of the checkpoint's blocks of this kind.
        last_used_at: Seconds since the epoch.
    """

    block_count: int
    last_used_at: float


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint that has run, and the kinds whose graphs it uses.

    Args:
        content_hash: Identity of the checkpoint's file or folder, 64 hex digits.
        name: For people.
        path: Where it was last seen.
        architecture: For people, e.g. ``"SDXL"``.
        kinds: Digest of a kind → how it is used.
    """

    content_hash: str
    name: str
    path: str
    architecture: str
    kinds: Mapping[str, KindUse]

    def to_json(self) -> dict[str, object]:
        """Return the record as a JSON object."""
        return {
            "schema": CHECKPOINT_SCHEMA,
            "content_hash": self.content_hash,
            "name": self.name,
            "path": self.path,
            "architecture": self.architecture,
            "kinds": {
                digest: {"block_count": use.block_count, "last_used_at": use.last_used_at}
                for digest, use in self.kinds.items()
            },
        }

    @classmethod
    def from_json(cls, record: object) -> CheckpointRecord:
        """Read what `to_json` returned.

        Raises:
            StoreError: The schema is unknown, or a field is missing or wrong.
        """
        fields = mapping(record, "checkpoint record")
        schema = fields.get("schema")
        if schema != CHECKPOINT_SCHEMA:
            raise StoreError(f"The record has schema {schema!r}, not {CHECKPOINT_SCHEMA}.")
        kinds = {}
        for digest, value in mapping(fields.get("kinds"), "kinds").items():
            use = mapping(value, "kind use")
            kinds[digest] = KindUse(count(use, "block_count"), number(use, "last_used_at"))
        return cls(
            content_hash=text(fields, "content_hash"),
            name=text(fields, "name"),
            path=text(fields, "path"),
            architecture=text(fields, "architecture"),
            kinds=kinds,
        )


def mapping(value: object, what: str) -> dict[str, object]:
    """Return a JSON object, or raise StoreError for any other value."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise StoreError(f"The {what} is not a JSON object.")
    return cast("dict[str, object]", value)


def items(value: object) -> list[object]:
    """Return a JSON array, or raise StoreError for any other value."""
    if not isinstance(value, list):
        raise StoreError("The value is not a JSON array.")
    return value


def text(fields: Mapping[str, object], name: str) -> str:
    """Return a field that is text, or raise StoreError."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise StoreError(f"Field {name!r} is not text.")
    return value


def count(fields: Mapping[str, object], name: str) -> int:
    """Return a field that is an integer of at least 0, or raise StoreError."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StoreError(f"Field {name!r} is not a count.")
    return value


def number(fields: Mapping[str, object], name: str) -> float:
    """Return a field that is a finite number, or raise StoreError."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StoreError(f"Field {name!r} is not a number.")
    try:
        finite = float(value)
    except OverflowError:
        finite = math.inf
    if not math.isfinite(finite):
        raise StoreError(f"Field {name!r} is not a finite number.")
    return finite


def seconds(value: object) -> float:
    """Return a duration in seconds; 0 for a missing one and for anything that is none."""
    try:
        found = number({"": value}, "")
    except StoreError:
        return 0.0
    return max(0.0, found)

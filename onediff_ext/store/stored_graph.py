"""One graph of the store, read from its file."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onediff_ext.core.errors import (
    GraphCorruptError,
    OptionError,
    SlowFileError,
    UnsafeFileError,
    UntrustedGraphError,
)
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.records import GraphHeader
from onediff_ext.core.untrusted_files import open_regular
from onediff_ext.store.graph_file import read_head, read_payload
from onediff_ext.store.permissions import why_not_ours

SUFFIX = ".graph"
# Graphs have some 10 MB; what is larger or slower than this is none.
MAX_GRAPH_BYTES = 4 << 30
_LIMIT_S = 300.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredGraph:
    """A graph that lies in the store.

    Args:
        header: What is known of it.
        path: Its file.
        size_bytes: Length of the file.
        last_used_at: Seconds since the epoch.
        payload: The checked bytes, if they were read; None in a listing.
    """

    header: GraphHeader
    path: Path
    size_bytes: int
    last_used_at: float
    payload: bytes | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> KindKey:
        """The kind that the graph serves."""
        return self.header.key

    @property
    def digest(self) -> str:
        """Digest of the key, which is also the file's name."""
        return self.path.stem

    @property
    def label(self) -> str:
        """Name for people."""
        return self.header.label

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the graph was built, never negative."""
        return max(0.0, now_s - self.header.created_at)


def graph_path(graphs: Path, digest: str) -> Path:
    """Return where the graph of a kind lies.

    Raises:
        OptionError: `digest` is not a digest, so it must not become a path.
    """
    if not is_digest(digest):
        raise OptionError(
            f"{digest!r} is not a graph's digest.",
            "A digest has 64 hexadecimal digits; `onediff-ext graphs list` shows them.",
        )
    return graphs / f"{digest}{SUFFIX}"


def is_digest(text: str) -> bool:
    """Whether `text` looks like a SHA-256 in hexadecimal."""
    return _DIGEST.fullmatch(text) is not None


def graph_paths(graphs: Path) -> Iterator[Path]:
    """Yield the graph files of a folder, sorted; none when there is no folder."""
    try:
        names = os.listdir(graphs)
    except OSError:
        return
    for name in sorted(names):
        if name.endswith(SUFFIX) and is_digest(name.removesuffix(SUFFIX)):
            yield graphs / name


def open_graph(path: Path, with_payload: bool) -> StoredGraph:
    """Read and check a graph file.

    Args:
        with_payload: Read and check the payload too.

    Raises:
        GraphCorruptError: Its bytes are not what was saved.
        UnknownSchemaError: Another version wrote it.
        UntrustedGraphError: Others own it or may write it.
        OSError: The file is missing or cannot be read.
    """
    try:
        with open_regular(path, limit_bytes=MAX_GRAPH_BYTES, limit_s=_LIMIT_S) as file:
            status = os.fstat(file.fileno())
            if reason := why_not_ours(path, status):
                raise UntrustedGraphError(
                    reason, f"If you trust it, own it alone: `chmod go-w '{path}'`; else delete it."
                )
            header = read_head(file, status.st_size)
            payload = read_payload(file, header) if with_payload else None
    except SlowFileError as exc:
        raise TimeoutError(errno.ETIMEDOUT, "it takes too long to read") from exc
    except UnsafeFileError as exc:
        raise GraphCorruptError("it is no regular file of a graph's size", exc.hint) from exc
    if header.key.digest != path.stem:
        raise GraphCorruptError(
            "the file holds the graph of another kind", "It is built again by itself."
        )
    return StoredGraph(header, path, status.st_size, status.st_mtime, payload)

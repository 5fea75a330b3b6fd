"""A graph of the store, as read from its file."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onediff_ext.core.errors import (
    GraphCorruptError,
    OptionError,
    SlowFileError,
    StoreError,
    UnsafeFileError,
    UntrustedGraphError,
)
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.records import GraphHeader
from onediff_ext.core.untrusted_files import open_regular
from onediff_ext.store.graph_file import read_head, read_payload
from onediff_ext.store.permissions import not_ours_reason

_LOG = logging.getLogger(__name__)
SUFFIX = ".graph"
# Graphs have some 10 MB. A file that is larger, or slower to read, is not a graph.
MAX_GRAPH_BYTES = 4 << 30
_LIMIT_S = 300.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredGraph:
    """A graph in the store.

    Args:
        header: The header of its file.
        path: The file.
        size_bytes: Length of the file.
        last_used_at: Seconds since the epoch.
        payload: The checked bytes; None when they were not read, as in a listing.
    """

    header: GraphHeader
    path: Path
    size_bytes: int
    last_used_at: float
    payload: bytes | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> KindKey:
        """The key of the graph's kind."""
        return self.header.key

    @property
    def digest(self) -> str:
        """Digest of the key, which is also the file's name."""
        return self.path.stem

    @property
    def label(self) -> str:
        """The kind's label, for people."""
        return self.header.label

    def note_use(self) -> None:
        """Set the file's last use, which is its modification time, to now."""
        try:
            # An explicit time, since the system's default has a resolution of some 4 ms.
            now_ns = time.time_ns()
            os.utime(self.path, ns=(now_ns, now_ns))
        except OSError as exc:
            _LOG.debug("Last use of %s is not recorded: %s", self.digest, exc)

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the graph was built, never negative.

        Args:
            now_s: The present time, seconds since the epoch.
        """
        return max(0.0, now_s - self.header.created_at)


def graph_path(graphs: Path, digest: str) -> Path:
    """Return the file of a kind's graph.

    Args:
        graphs: The folder of the graphs.
        digest: Of the kind's key.

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
    """Whether `text` looks like a SHA-256 in hexadecimal.

    Args:
        text: Any text.
    """
    return _DIGEST.fullmatch(text) is not None


def graph_paths(graphs: Path) -> Iterator[Path]:
    """Yield the graph files of a folder, sorted; nothing when the folder is missing.

    Args:
        graphs: The folder of the graphs.
    """
    try:
        names = os.listdir(graphs)
    except OSError:
        return
    for name in sorted(names):
        if name.endswith(SUFFIX) and is_digest(name.removesuffix(SUFFIX)):
            yield graphs / name


def list_graphs(graphs: Path) -> Iterator[StoredGraph]:
    """Yield the sound graphs of a folder, without their payloads.

    Args:
        graphs: The folder of the graphs.
    """
    for path in graph_paths(graphs):
        try:
            yield open_graph(path, with_payload=False)
        except (OSError, StoreError) as exc:
            _LOG.debug("Not listed: %s: %s", path.name, exc)


def open_graph(path: Path, with_payload: bool) -> StoredGraph:
    """Read and check a graph file.

    Args:
        path: The file.
        with_payload: Also read and check the payload.

    Returns:
        The graph; its payload is None without `with_payload`.

    Raises:
        GraphCorruptError: Its bytes differ from the saved ones.
        UnknownSchemaError: Another version wrote it.
        UntrustedGraphError: Others own it or may write it.
        TimeoutError: It takes too long to read.
        OSError: The file is missing or cannot be read.
    """
    try:
        with open_regular(path, limit_bytes=MAX_GRAPH_BYTES, limit_s=_LIMIT_S) as file:
            status = os.fstat(file.fileno())
            if reason := not_ours_reason(path, status):
                raise UntrustedGraphError(
                    reason, f"If you trust it, own it alone: `chmod go-w '{path}'`; else delete it."
                )
            header = read_head(file, status.st_size)
            payload = read_payload(file, header) if with_payload else None
    except SlowFileError as exc:
        raise TimeoutError(errno.ETIMEDOUT, "it takes too long to read") from exc
    except UnsafeFileError as exc:
        raise GraphCorruptError("it is not a regular file of a graph's size", exc.hint) from exc
    if header.key.digest != path.stem:
        raise GraphCorruptError(
            "the file holds the graph of another kind", "It is built again by itself."
        )
    return StoredGraph(header, path, status.st_size, status.st_mtime, payload)

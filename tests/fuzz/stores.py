"""Targets: records of a store, graph files and archives."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.panel.graph_rows import graph_groups
from onediff_ext.store import (
    BuildHistory,
    BuildRecords,
    CheckpointRecords,
    ContentHashes,
    GraphLibrary,
)
from onediff_ext.store.graph_file import read_head, read_payload
from tests.fuzz.strategies import damaged, near
from tests.fuzz.target import Target

DIGEST = "ab" * 32
MACHINE = "cd" * 32
LIMIT_BYTES = 2**20

CHECKPOINT = {
    "schema": 1, "content_hash": DIGEST, "name": "model", "path": "/m", "architecture": "sd1",
    "kinds": {DIGEST: {"block_count": 2, "last_used_at": 1.5}},
}  # fmt: skip
HISTORY = {
    "schema": 1,
    "builds": {MACHINE: {"One 8": [1.0, 2.0]}},
    "steps": [
        {"checkpoint": DIGEST, "machine": MACHINE, "size": "64x64", "eager_ms": 2.0,
         "compiled_ms": 1.0, "at": 1.0},
    ],
}  # fmt: skip
VERDICT = {
    "schema": 1, "label": "One",
    "failure": {"reason": "r", "attempts": 1, "at": 1.0, "version": "1"},
    "proofs": {MACHINE: {"payload_sha256": DIGEST, "problem": "", "at": 1.0}},
    "eviction": {"reason": "r", "at": 1.0},
}  # fmt: skip
HASHES = {
    "schema": 1,
    "files": {"/m": {"size_bytes": 1, "mtime_ns": 1, "sha256": DIGEST, "hashed_at": 1.0}},
}


@contextlib.contextmanager
def _library() -> Iterator[GraphLibrary]:
    with tempfile.TemporaryDirectory(prefix="onediff-fuzz-") as folder:
        library = GraphLibrary(Path(folder) / "store", LIMIT_BYTES)
        library.folder.prepare()
        yield library


def _records(value: list[Any]) -> None:
    """Records of any content: all that reads them gives an answer or one of our errors."""
    checkpoint, history, build_record, hashes = value
    with _library() as library:
        folder = library.folder
        for path, record in (
            (folder.checkpoints / f"{DIGEST}.json", checkpoint),
            (folder.home / "history.json", history),
            (folder.build_records / f"{DIGEST}.json", build_record),
            (folder.home / "content-hashes.json", hashes),
        ):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(record), encoding="ascii")
        for use in (
            lambda: CheckpointRecords(folder).read(DIGEST),
            lambda: CheckpointRecords(folder).record(
                DIGEST, name="m", path="/m", architecture="sd1", kinds={DIGEST: 1}
            ),
            lambda: BuildHistory(folder).build_seconds(MACHINE, "oneflow", ["One 8", "Two"]),
            lambda: BuildHistory(folder).record_build(MACHINE, "oneflow", "One 8", 1.0),
            lambda: BuildRecords(folder).read(DIGEST),
            lambda: BuildRecords(folder).failure(DIGEST, "1"),
            lambda: BuildRecords(folder).load_check(DIGEST, MACHINE, DIGEST),
            lambda: ContentHashes(folder).content_hash(folder.home / "content-hashes.json"),
            lambda: [group.as_json() for group in graph_groups(library, MACHINE)],
        ):
            with contextlib.suppress(OneDiffError):
                use()


@cache
def _exported() -> tuple[bytes, bytes]:
    """One graph file, and an archive of two."""
    with _library() as library:
        for number in (1, 2):
            library.put(
                KindKey({"block": "One", "number": str(number)}), b"code" * 9, label="One",
                backend="eager", build_seconds=1.0, details={"a": [1]},
            )  # fmt: skip
        path = library.folder.root / "out.zip"
        library.export(path)
        graph = next(library.folder.graphs.rglob("*.*"))
        return graph.read_bytes(), path.read_bytes()


def _graph(content: bytes) -> None:
    stream = io.BytesIO(content)
    with contextlib.suppress(OneDiffError):
        header = read_head(stream, len(content))
        payload = read_payload(stream, header)
        # Nothing but what was saved is ever read back.
        assert content == _exported()[0]
        assert payload == b"code" * 9


def _archive(content: bytes) -> None:
    with _library() as library:
        path = library.folder.root / "in.zip"
        path.write_bytes(content)
        before = {entry.relative_to(library.folder.root) for entry in _outside(library)}
        with contextlib.suppress(OneDiffError):
            report = library.import_archive(path, trust=True)
            for digest in report.imported:
                assert [graph for graph in library.entries() if graph.digest == digest]
        assert {entry.relative_to(library.folder.root) for entry in _outside(library)} == before
        shutil.rmtree(library.folder.root, ignore_errors=True)


def _outside(library: GraphLibrary) -> list[Path]:
    """The files beside the store; an archive must not add any."""
    return [path for path in library.folder.root.parent.iterdir() if path != library.folder.root]


def _packed(names: list[tuple[str, bytes, int]]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content, times in names:
            with contextlib.suppress(UnicodeError, ValueError, IndexError):
                archive.writestr(name, content * times, compress_type=zipfile.ZIP_DEFLATED)
    return stream.getvalue()


_ARCHIVES = st.one_of(
    st.deferred(lambda: damaged([_exported()[1]])),
    st.lists(
        st.tuples(
            st.sampled_from([f"{DIGEST}.graph", "../a", "/etc/x", "C:\\x", f"{DIGEST}.graph/", ""]),
            st.binary(max_size=20),
            st.sampled_from([1, 10**5]),
        ),
        max_size=3,
    ).map(_packed),
)

TARGETS = (
    Target(
        "records",
        st.tuples(near([CHECKPOINT]), near([HISTORY]), near([VERDICT]), near([HASHES])).map(list),
        _records,
    ),
    Target("graph-files", st.deferred(lambda: damaged([_exported()[0]])), _graph),
    Target("archives", _ARCHIVES, _archive),
)

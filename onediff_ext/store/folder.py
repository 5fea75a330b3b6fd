"""The store's layout on disk, and which part of it belongs to this version.

    <root>/schema.json          {"schema": 1, "check": …}, written with the first graph
    <root>/graphs/              <digest of the kind's key>.graph
    <root>/checkpoints/         <content hash>.json
    <root>/verdicts/            <digest of the kind's key>.json, the build records
    <root>/content-hashes.json  cache of content hashes
    <root>/history.json         build times and measured steps
    <root>/saved-time.json      the time that graphs have saved
    <root>/last-kinds.json      the kinds that pipelines used last time
    <root>/last-use.json        what each WebUI's last picture was drawn with
    <root>/compiler-files/      what compilers make for all graphs alike, for the next build process
    <root>/tmp/  <root>/locks/  parts being written, lock files

A store whose `schema.json` names another schema belongs to another version of this product, which
leaves it unread and unchanged. This version then uses `<root>/schema-1/` with the same layout, so
both versions work side by side.

The check value distinguishes another schema from a damaged file. When the file is damaged, the
graphs show which version the store belongs to, since each names its schema too. This version then
writes its own `schema.json` again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

from onediff_ext.core.errors import UnsafeFileError
from onediff_ext.core.untrusted_files import open_regular
from onediff_ext.store.durable_write import sync_folder, write_and_sync
from onediff_ext.store.graph_file import GRAPH_SCHEMA, peek_schema
from onediff_ext.store.json_records import RecordError, read_record
from onediff_ext.store.locks import StoreLocks
from onediff_ext.store.permissions import secure_folder
from onediff_ext.store.stored_graph import graph_paths
from onediff_ext.store.write_errors import mapped_write_errors

STORE_SCHEMA = 1
_SCHEMA_FILE = "schema.json"
_FOLDERS = ("graphs", "checkpoints", "verdicts", "compiler-files", "tmp", "locks")
_PEEK_BYTES = 12
_PRIVATE = 0o700  # graphs are native code: other users must not put one there


class StoreFolder:
    """The paths of one store. Creates nothing until `prepare` is called.

    Args:
        root: The store's folder; it may be missing.

    Attributes:
        root: As given.
        is_schema_damaged: `schema.json` is damaged, and not written again yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_schema_damaged = False  # known after the first use of `home`
        self._home: Path | None = None

    @property
    def home(self) -> Path:
        """The part of the store that this version reads and writes."""
        if self._home is not None:
            return self._home
        try:
            schema = _read_schema(self.root)
        except OSError:
            return self.root  # no store yet, so not decided
        if schema is None:
            self.is_schema_damaged = True
            schema = _schema_of_graphs(self.root)
        self._home = self.root if schema == STORE_SCHEMA else self.aside
        return self._home

    @property
    def aside(self) -> Path:
        """Where this version keeps its part while the root belongs to another one."""
        return self.root / f"schema-{STORE_SCHEMA}"

    @property
    def graphs(self) -> Path:
        """Folder of the graphs."""
        return self.home / "graphs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoint records."""
        return self.home / "checkpoints"

    @property
    def build_records(self) -> Path:
        """Folder of the build records; "verdicts" is its older name."""
        return self.home / "verdicts"

    @property
    def compiler_files(self) -> Path:
        """Folder of the compilers' files that all graphs share; may be deleted at any time."""
        return self.home / "compiler-files"

    @property
    def tmp(self) -> Path:
        """Folder of the part files that are being written."""
        return self.home / "tmp"

    @property
    def locks(self) -> StoreLocks:
        """The store's locks; call `prepare` first."""
        return StoreLocks(self.home / "locks")

    def exists(self) -> bool:
        """Whether this version has stored anything."""
        return os.path.isdir(self.graphs)

    def other_versions_graphs(self) -> list[Path]:
        """Return the graph folders that belong to other versions."""
        ours = {self.home, self.aside}
        homes = [self.root, *self.root.glob("schema-*")] if os.path.isdir(self.root) else []
        return [home / "graphs" for home in homes if home not in ours]

    def secure(self) -> None:
        """Remove the write permission of other users from the store's folders.

        Raises:
            UntrustedGraphError: A folder belongs to another user, or its permissions cannot change.
        """
        home = self.home
        for folder in {self.root, home}:
            secure_folder(folder, holds_code=False)
        for name in _FOLDERS:
            secure_folder(home / name, holds_code=True)

    def prepare(self) -> None:
        """Create missing folders, readable by this user only, and `schema.json`.

        Raises:
            StoreFullError, StoreReadOnlyError: A folder cannot be created.
            UntrustedGraphError: A folder belongs to another user, or others may write it.
        """
        home = self.home
        with mapped_write_errors(self.root):
            self.root.parent.mkdir(parents=True, exist_ok=True)
            wanted = [self.root, home, *(home / name for name in _FOLDERS)]
            made = [folder for folder in wanted if _make_private(folder)]
            for parent in dict.fromkeys(folder.parent for folder in made):
                sync_folder(parent)  # a synced graph in a lost folder would be lost too
        self.secure()
        if self._home is None or (self.is_schema_damaged and home == self.root):
            self._write_schema()
            if self.home != home:  # another version was first
                self.prepare()

    def _write_schema(self) -> None:
        target = self.root / _SCHEMA_FILE
        with self.locks.guard(), mapped_write_errors(target):
            if not os.path.lexists(target) or _read_schema(self.root) is None:
                part = self.tmp / f"schema-{secrets.token_hex(8)}.part"
                try:
                    write_and_sync(part, [encode_schema(STORE_SCHEMA)])
                    os.replace(part, target)
                finally:
                    part.unlink(missing_ok=True)
                sync_folder(self.root)
        self.is_schema_damaged = False


def encode_schema(schema: int) -> bytes:
    """Return the content of `schema.json`. Its check value reveals any flipped bit.

    Args:
        schema: The schema number.
    """
    return json.dumps({"schema": schema, "check": _check(schema)}).encode("ascii")


def _check(schema: int) -> str:
    return hashlib.sha256(b"onediff-ext store, schema %d" % schema).hexdigest()[:16]


def _read_schema(root: Path) -> int | None:
    """The schema that `schema.json` names; None when it is damaged.

    Raises:
        FileNotFoundError: There is none.
    """
    try:
        record = read_record(root / _SCHEMA_FILE)
    except RecordError:
        return None
    if record == {"schema": STORE_SCHEMA}:
        return STORE_SCHEMA  # early versions wrote no check value
    if not isinstance(record, dict) or not isinstance(schema := record.get("schema"), int):
        return None
    is_sound = schema >= 0 and record == {"schema": schema, "check": _check(schema)}
    return schema if is_sound else None


def _schema_of_graphs(root: Path) -> int:
    """The schema that the graphs name; this version's when there are none, or one of its own."""
    found: set[int] = set()
    for path in graph_paths(root / "graphs"):
        try:
            with open_regular(path, limit_bytes=1 << 62) as file:
                schema = peek_schema(file.read(_PEEK_BYTES))
        except (OSError, UnsafeFileError):
            continue
        if schema is not None:
            found.add(schema)
    return min(found) if found and GRAPH_SCHEMA not in found else STORE_SCHEMA


def _make_private(folder: Path) -> bool:
    """Make a folder for this user only; return whether it was missing."""
    try:
        folder.mkdir(mode=_PRIVATE)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True

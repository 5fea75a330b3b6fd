"""The store's layout on disk, and which part of it is ours.

    <root>/schema.json          {"schema": 1}, written with the first graph
    <root>/graphs/              <digest of the kind's key>.graph
    <root>/checkpoints/         <content hash>.json
    <root>/verdicts/            <digest of the kind's key>.json
    <root>/content-hashes.json  cache of content hashes
    <root>/history.json         build times and measured steps
    <root>/tmp/  <root>/locks/  parts being written, lock files

A store whose `schema.json` names another schema belongs to another version of this
product. Nothing in it is read or changed; ours then lies in `<root>/schema-1/`, with
the same layout, so both versions work side by side.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from .durable import write_and_sync
from .locks import StoreLocks
from .write_errors import mapped_write_errors

STORE_SCHEMA = 1
_SCHEMA_FILE = "schema.json"
_FOLDERS = ("graphs", "checkpoints", "verdicts", "tmp", "locks")
_PRIVATE = 0o700  # graphs are native code: nobody else may put one there


class StoreFolder:
    """Paths of one store. Creates nothing until `prepare` is called.

    Args:
        root: The store's folder; need not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._home: Path | None = None

    @property
    def home(self) -> Path:
        """The part of the store that this version reads and writes."""
        if self._home is not None:
            return self._home
        try:
            encoded = (self.root / _SCHEMA_FILE).read_bytes()
        except OSError:
            return self.root  # no store yet: not decided
        own = self.root / f"schema-{STORE_SCHEMA}"
        self._home = self.root if _schema_of(encoded) == STORE_SCHEMA else own
        return self._home

    @property
    def graphs(self) -> Path:
        """Folder of the graphs."""
        return self.home / "graphs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoint records."""
        return self.home / "checkpoints"

    @property
    def verdicts(self) -> Path:
        """Folder of what was learnt about kinds."""
        return self.home / "verdicts"

    @property
    def tmp(self) -> Path:
        """Folder of the files that are being written."""
        return self.home / "tmp"

    @property
    def locks(self) -> StoreLocks:
        """The store's locks; `prepare` must have been called."""
        return StoreLocks(self.home / "locks")

    def exists(self) -> bool:
        """Whether this version has stored anything."""
        return self.graphs.is_dir()

    def other_versions_graphs(self) -> list[Path]:
        """Return the graph folders that belong to other versions."""
        homes = [self.root, *self.root.glob("schema-*")]
        return [home / "graphs" for home in homes if home != self.home]

    def prepare(self) -> None:
        """Create what is missing, readable by this user only.

        Raises:
            StoreFullError, StoreReadOnlyError: The folder cannot be created.
        """
        home = self.home
        with mapped_write_errors(self.root):
            self.root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.root, home):
                folder.mkdir(mode=_PRIVATE, exist_ok=True)
            for name in _FOLDERS:
                folder = home / name
                folder.mkdir(mode=_PRIVATE, exist_ok=True)
        if self._home is None:
            self._write_schema()
            if self.home != home:  # another version was first
                self.prepare()

    def _write_schema(self) -> None:
        target = self.root / _SCHEMA_FILE
        with self.locks.guard(), mapped_write_errors(target):
            if not target.exists():
                part = self.tmp / f"schema-{secrets.token_hex(8)}.part"
                try:
                    write_and_sync(part, [json.dumps({"schema": STORE_SCHEMA}).encode("ascii")])
                    os.replace(part, target)
                finally:
                    part.unlink(missing_ok=True)


def _schema_of(encoded: bytes) -> object:
    try:
        record = json.loads(encoded)
    except (ValueError, RecursionError):
        return None
    return record.get("schema") if isinstance(record, dict) else None

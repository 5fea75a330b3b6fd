"""Small JSON files of a store that processes share, for what may be lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from onediff_ext.core.errors import StoreError
from onediff_ext.core.records import mapping
from onediff_ext.store.atomic_write import publish
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import RecordError, read_record

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class SharedRecord(Generic[T]):
    """One small JSON file that any process reads, and changes under a lock.

    A file that is missing, damaged or of another schema starts again as an empty one. A change
    that cannot be written is just logged.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
        name: Of the file, e.g. ``"saved-time.json"``; its lock has the name without the suffix.
        schema: Number of the file's form.
        parse: Reads the fields of a file, or of an empty one for ``{}``; raises `StoreError`.
        encode: Returns the fields of a value, without the schema.
        lock_timeout_s: How long a change waits for the lock, in seconds.
    """

    def __init__(
        self,
        folder: StoreFolder,
        name: str,
        schema: int,
        parse: Callable[[Mapping[str, object]], T],
        encode: Callable[[T], Mapping[str, object]],
        lock_timeout_s: float,
    ) -> None:
        self._folder, self._name = folder, name
        self._schema, self._lock_timeout_s = schema, lock_timeout_s
        self._parse, self._encode = parse, encode

    def read(self) -> T:
        """Return the content of the file; that of an empty one where it cannot be read."""
        try:
            return self._read()
        except FileNotFoundError:
            pass
        except (StoreError, OSError) as exc:
            _LOG.debug("%s starts again: %s", self._name, exc)
        return self._parse({})

    def change(self, change: Callable[[T], object]) -> None:
        """Read the file, change its content, and publish the result.

        Args:
            change: Changes the content in place.
        """
        try:
            self._folder.prepare()
            lock = self._name.removesuffix(".json")
            with self._folder.locks.hold(lock, self._lock_timeout_s):
                value = self.read()
                change(value)
                fields = {"schema": self._schema, **self._encode(value)}
                encoded = json.dumps(fields, indent=1).encode("ascii")
                publish(self._folder, self._folder.home / self._name, [encoded])
        except StoreError as exc:
            _LOG.debug("%s is not written: %s", self._name, exc)

    def _read(self) -> T:
        fields = mapping(read_record(self._folder.home / self._name), self._name)
        if fields.pop("schema", None) != self._schema:
            raise RecordError("It is of another version.")
        return self._parse(fields)

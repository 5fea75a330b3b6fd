"""The kinds that pipelines used last time, by the pipeline's form, in one small file."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from onediff_ext.core.errors import StoreError
from onediff_ext.core.records import items, mapping
from onediff_ext.store.atomic_write import publish
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import RecordError, read_or_empty
from onediff_ext.store.stored_graph import is_digest

logger = logging.getLogger(__name__)

LAST_KINDS_FILE = "last-kinds.json"
_SCHEMA = 1
_KEPT = 64  # forms
# At the end of a picture: a next start that reads no graphs ahead is better than a wait.
_LOCK_TIMEOUT_S = 0.1

_Record = dict[str, list[str]]  # form → digests, the form that was used last at the end


class LastKinds:
    """What the pipelines of one store used last. Only a hint, so failed writes are just logged.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder

    def of(self, form: str) -> list[str]:
        """Return the digests of a form's kinds in the order of their first use.

        Args:
            form: As for `record`.
        """
        return self._read().get(form, [])

    def record(self, form: str, digests: Sequence[str]) -> None:
        """Record the kinds of one form, in place of earlier ones.

        Args:
            form: Digest of all that pipelines with the same kinds have in common.
            digests: Of the kinds' keys, in the order of their first use.
        """
        try:
            self._folder.prepare()
            with self._folder.locks.hold("last-kinds", _LOCK_TIMEOUT_S):
                record = self._read()
                record.pop(form, None)
                record[form] = list(digests)
                whole = {"schema": _SCHEMA, "forms": dict(list(record.items())[-_KEPT:])}
                encoded = json.dumps(whole, indent=1).encode("ascii")
                publish(self._folder, self._folder.home / LAST_KINDS_FILE, [encoded])
        except StoreError as exc:
            logger.debug("The kinds of this pipeline are not recorded: %s", exc)

    def _read(self) -> _Record:
        return read_or_empty(self._folder.home / LAST_KINDS_FILE, _parse, {}, "last kinds")


def _parse(record: object) -> _Record:
    fields = mapping(record, "record of kinds")
    if fields.get("schema") != _SCHEMA:
        raise RecordError("It is of another version.")
    return {
        form: [digest for digest in items(digests) if isinstance(digest, str) and is_digest(digest)]
        for form, digests in mapping(fields.get("forms"), "forms").items()
    }

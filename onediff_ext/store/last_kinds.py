"""The kinds that pipelines used last time, by the pipeline's form, in one small file."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass

from onediff_ext.core.errors import StoreError
from onediff_ext.core.records import items, mapping
from onediff_ext.store.atomic_write import publish
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import RecordError, read_or_empty
from onediff_ext.store.stored_graph import is_digest

logger = logging.getLogger(__name__)

LAST_KINDS_FILE = "last-kinds.json"
_SCHEMA = 2
_KEPT = 64  # forms
COUNTED_PICTURES = 10
# At the end of a picture: a next start that reads no graphs ahead is better than a wait.
_LOCK_TIMEOUT_S = 0.1


@dataclass(frozen=True)
class LastUse:
    """What pipelines of one form did last.

    Args:
        kinds: Digests of the kinds' keys, in the order of their first use.
        saved_s: Estimate of what graphs save in a picture, in seconds.
        load_s: How long it took to load the graphs ahead, in seconds; 0 where that is not known.
        pictures: How many pictures the process has drawn; `COUNTED_PICTURES` for more.
    """

    kinds: tuple[str, ...] = ()
    saved_s: float = 0.0
    load_s: float = 0.0
    pictures: int = 0


_Record = dict[str, LastUse]  # by form, the form that was used last at the end


class LastKinds:
    """What the pipelines of one store used last. Only a hint, so failed writes are just logged.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder

    def of(self, form: str) -> LastUse:
        """Return the last use of a form; one without kinds where nothing is recorded.

        Args:
            form: As for `record`.
        """
        return self._read().get(form, LastUse())

    def record(self, form: str, use: LastUse) -> None:
        """Record the last use of one form, in place of the earlier one.

        Args:
            form: Digest of all that pipelines with the same kinds have in common.
            use: What the process has done with it so far.
        """
        try:
            self._folder.prepare()
            with self._folder.locks.hold("last-kinds", _LOCK_TIMEOUT_S):
                record = self._read()
                record.pop(form, None)
                record[form] = use
                kept = {name: asdict(use) for name, use in list(record.items())[-_KEPT:]}
                encoded = json.dumps({"schema": _SCHEMA, "forms": kept}, indent=1).encode("ascii")
                publish(self._folder, self._folder.home / LAST_KINDS_FILE, [encoded])
        except StoreError as exc:
            logger.debug("The kinds of this pipeline are not recorded: %s", exc)

    def _read(self) -> _Record:
        return read_or_empty(self._folder.home / LAST_KINDS_FILE, _parse, {}, "last kinds")


def _parse(record: object) -> _Record:
    fields = mapping(record, "record of kinds")
    if fields.get("schema") != _SCHEMA:
        raise RecordError("It is of another version.")
    return {form: _use(use) for form, use in mapping(fields.get("forms"), "forms").items()}


def _use(record: object) -> LastUse:
    fields = mapping(record, "last use")
    digests = items(fields.get("kinds"))
    return LastUse(
        tuple(digest for digest in digests if isinstance(digest, str) and is_digest(digest)),
        _seconds(fields.get("saved_s")),
        _seconds(fields.get("load_s")),
        round(min(_seconds(fields.get("pictures")), COUNTED_PICTURES)),
    )


def _seconds(value: object) -> float:
    if isinstance(value, (int, float)) and math.isfinite(value) and value > 0:
        return float(value)
    return 0.0

"""The kinds that pipelines used last time, by the pipeline's form, in one small file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from onediff_ext.core.records import items, mapping, seconds
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.shared_record import SharedRecord
from onediff_ext.store.stored_graph import is_digest

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


_Uses = dict[str, LastUse]  # by form, the form that was used last at the end


class LastKinds:
    """What the pipelines of one store used last. Only a hint, so failed writes are just logged.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._record = SharedRecord(
            folder, LAST_KINDS_FILE, _SCHEMA, _parse, _fields, _LOCK_TIMEOUT_S
        )

    def of(self, form: str) -> LastUse:
        """Return the last use of a form; one without kinds where nothing is recorded.

        Args:
            form: As for `record`.
        """
        return self._record.read().get(form, LastUse())

    def record(self, form: str, use: LastUse) -> None:
        """Record the last use of one form, in place of the earlier one.

        Args:
            form: Digest of all that pipelines with the same kinds have in common.
            use: What the process has done with it so far.
        """

        def replace(uses: _Uses) -> None:
            uses.pop(form, None)  # so that it comes last
            uses[form] = use
            for old in list(uses)[:-_KEPT]:
                del uses[old]

        self._record.change(replace)


def _fields(uses: _Uses) -> dict[str, object]:
    return {"forms": {form: asdict(use) for form, use in uses.items()}}


def _parse(fields: Mapping[str, object]) -> _Uses:
    return {form: _use(use) for form, use in mapping(fields.get("forms", {}), "forms").items()}


def _use(record: object) -> LastUse:
    fields = mapping(record, "last use")
    digests = items(fields.get("kinds"))
    return LastUse(
        tuple(digest for digest in digests if isinstance(digest, str) and is_digest(digest)),
        seconds(fields.get("saved_s")),
        seconds(fields.get("load_s")),
        round(min(seconds(fields.get("pictures")), COUNTED_PICTURES)),
    )

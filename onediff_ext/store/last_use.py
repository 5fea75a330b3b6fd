"""What the last picture of each WebUI was drawn with: the next start loads its graphs early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from onediff_ext.core.records import mapping, seconds, text
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import RecordError
from onediff_ext.store.shared_record import SharedRecord
from onediff_ext.store.stored_graph import is_digest

LAST_USE_FILE = "last-use.json"
_SCHEMA = 1
# At the end of a picture: a next start without graphs at once is better than a picture that waits.
_LOCK_TIMEOUT_S = 0.1

_Uses = dict[str, "WebUIUse"]  # by the WebUI's name


@dataclass(frozen=True)
class WebUIUse:
    """What a picture was drawn with.

    Args:
        choices: The user's, by name, as JSON has them.
        content_hash, name, path, architecture: Of the checkpoint, as in `CheckpointRecords.record`.
        device: Where its models were, such as ``"cuda:0"``.
        saved_s: Estimate of what graphs save in a step of a megapixel, in seconds; 0 where that is
            not known.
        load_s: How long it took to load the graphs ahead, in seconds; 0 where that is not known.
    """

    choices: Mapping[str, object]
    content_hash: str
    name: str
    path: str
    architecture: str
    device: str
    saved_s: float = 0.0
    load_s: float = 0.0


class WebUIUses:
    """The last uses of the WebUIs that share a store.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._record = SharedRecord(
            folder, LAST_USE_FILE, _SCHEMA, _parse, _fields, _LOCK_TIMEOUT_S
        )

    def forget(self, host: str) -> None:
        """Forget a WebUI's last use: the user draws without graphs now.

        Args:
            host: The WebUI's name.
        """
        self._record.change(lambda uses: uses.pop(host, None))

    def of(self, host: str) -> WebUIUse | None:
        """Return what the last picture was drawn with; None if there was none.

        Args:
            host: The WebUI's name, e.g. ``"forge"``.
        """
        return self._record.read().get(host)

    def note(self, host: str, use: WebUIUse) -> None:
        """Remember what a picture was drawn with. A failed write is just logged.

        Args:
            host: The WebUI's name.
            use: What it was drawn with.
        """
        self._record.change(lambda uses: uses.update({host: use}))


def _fields(uses: _Uses) -> dict[str, object]:
    return {"hosts": {host: asdict(use) for host, use in uses.items()}}


def _parse(fields: Mapping[str, object]) -> _Uses:
    hosts = mapping(fields.get("hosts", {}), "hosts")
    return {host: _use(mapping(use, "last use of a host")) for host, use in hosts.items()}


def _use(fields: dict[str, object]) -> WebUIUse:
    names = ("content_hash", "name", "path", "architecture", "device")
    choices = mapping(fields.get("choices"), "choices")
    use = WebUIUse(
        choices,
        **{name: text(fields, name) for name in names},
        saved_s=seconds(fields.get("saved_s")),
        load_s=seconds(fields.get("load_s")),
    )
    if not is_digest(use.content_hash):
        raise RecordError("Its content hash is none.")
    return use
